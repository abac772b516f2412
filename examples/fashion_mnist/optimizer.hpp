// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace fashion_mnist {

/// Makes the optimizer that --optimizer names: LibTorch's algorithms, in one pass over memory.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                               std::vector<at::Tensor> parameters,
                                                               double learning_rate) {
  using namespace gradaccum::optim;
  if (name == "sgd") return std::make_unique<SGD>(parameters, SGDOptions(learning_rate));
  if (name == "momentum") return std::make_unique<SGD>(parameters, SGDOptions(learning_rate).momentum(0.9));
  if (name == "adam") return std::make_unique<Adam>(parameters, AdamOptions(learning_rate));
  if (name == "adamw") return std::make_unique<AdamW>(parameters, AdamWOptions(learning_rate));
  throw std::invalid_argument("optimizer must be sgd, momentum, adam or adamw, got '" + name + "'");
}

}  // namespace fashion_mnist
