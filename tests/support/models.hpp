// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

/// A small model, data for it, and the distance between two models, which most tests use.
namespace testing {

/// Makes the same parameters always: ranks that are threads share LibTorch's generator, so they take turns.
inline torch::nn::Sequential make_model(at::ScalarType dtype = at::kDouble) {
  static std::mutex one_draws;
  const std::lock_guard lock(one_draws);
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
  model->to(dtype);
  return model;
}

using Example = torch::data::Example<>;

/// Makes one micro-batch of each size.
inline std::vector<Example> make_batches(const std::vector<std::int64_t>& sizes, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(5);
  std::vector<Example> batches;
  for (auto size : sizes) batches.emplace_back(torch::randn({size, 4}, dtype), torch::randn({size, 3}, dtype));
  return batches;
}

/// Joins micro-batches [from, to) to one large batch.
inline Example joined(const std::vector<Example>& batches, std::size_t from, std::size_t to) {
  std::vector<at::Tensor> data, target;
  for (auto i = from; i < std::min(to, batches.size()); ++i) {
    data.push_back(batches[i].data);
    target.push_back(batches[i].target);
  }
  return {torch::cat(data), torch::cat(target)};
}

template <class Model>
at::Tensor loss_of(Model& model, const Example& batch) {
  return torch::mse_loss(model->forward(batch.data), batch.target);
}

/// Copies all parameters to one vector.
template <class Model>
at::Tensor flat(const Model& model) {
  std::vector<at::Tensor> all;
  for (auto& parameter : model->parameters()) all.push_back(parameter.detach().flatten());
  return torch::cat(all).clone();
}

/// max |a - b| / max |b|
inline double distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).to(at::kDouble).template item<double>();
}

template <class A, class B>
double distance(const A& a, const B& b) {
  return distance(flat(a), flat(b));
}

}  // namespace testing
