// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradaccum.hpp>

#include <torch/torch.h>

#include <barrier>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <string_view>
#include <vector>

namespace ga = gradaccum;

// Names that the documentation's snippets use: a model, its optimizer, an objective, and data.
inline torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
inline auto x = torch::randn({10, 4}), y = torch::randn({10, 3});
inline auto images = torch::randn({10, 4}), labels = torch::randint(3, {10});
inline torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(1e-3));
inline ga::GradAccumulator optimizer(sgd, {.steps = 2});
inline const auto objective = [](auto& net, auto& batch) {
  return torch::mse_loss(net->forward(batch.data), batch.target);
};
inline ga::data::TensorBatches batches(x, y, {.batch_size = 2});

// A snippet of a document, which begins on this line.
struct Snippet {
  std::string_view document;
  int line;
  void (*run)();
};
inline std::vector<Snippet> snippets;

inline bool add_snippet(std::string_view document, int line, void (*run)()) {
  snippets.push_back({document, line, run});
  return true;
}
