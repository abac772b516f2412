// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

/// Parameters with gradients for the benchmarks of optimizers, and the same steps by ATen's operations.
namespace parameter_sets {

struct ParameterSet {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::int64_t columns = 0;  ///< of tensors with more than 4 such rows, which become matrices; 0: only vectors

  std::vector<std::int64_t> shape(std::int64_t size) const {
    if (columns > 0 && size > 4 * columns) return {size / columns, columns};
    return {size};
  }
  double elements() const { return static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})); }
  std::string description() const {
    return fmt::format("{}: {} tensors, {:.2f} M parameters", name, sizes.size(), elements() / 1e6);
  }
};

/// Returns a small network, a transformer in the shape of BLOOM with many small tensors, and a few large ones.
inline std::vector<ParameterSet> all() {
  constexpr std::int64_t hidden = 256, vocabulary = 32'000, blocks = 24, classes = 2;
  std::vector<std::int64_t> bloom{vocabulary * hidden, hidden, hidden};
  for (int block = 0; block < blocks; ++block) {
    bloom.insert(bloom.end(), {hidden, hidden, 3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden});  // attention
    bloom.insert(bloom.end(), {hidden, hidden, 4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden});
  }
  bloom.insert(bloom.end(), {hidden, hidden, classes * hidden});
  return {{"MLP 784-512-512-10", {784 * 512, 512, 512 * 512, 512, 512 * 10, 10}},
          {"BLOOM-shaped, hidden size 256", bloom},
          {"large tensors", std::vector<std::int64_t>(16, 4'200'000)}};
}

/// Makes parameters with gradients; each contestant gets its own, with the same values.
inline std::vector<at::Tensor> make_parameters(const ParameterSet& set, at::Device device = at::kCPU) {
  torch::manual_seed(0);
  std::vector<at::Tensor> parameters;
  for (const auto size : set.sizes) {
    parameters.push_back(torch::randn(set.shape(size), device).requires_grad_());
    parameters.back().mutable_grad() = torch::randn(set.shape(size), device);
  }
  return parameters;
}

inline std::vector<at::Tensor> zeros_like(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> zeros;
  for (auto& tensor : tensors) zeros.push_back(torch::zeros_like(tensor));
  return zeros;
}

/// Calls the operation of Python's `AdamW(fused=True)`.
struct AtenFusedAdamW {
  explicit AtenFusedAdamW(const std::vector<at::Tensor>& with_gradients, const torch::optim::AdamWOptions& options)
      : options(options) {
    for (auto& parameter : with_gradients) {
      parameters.push_back(parameter.detach());
      gradients.push_back(parameter.grad());
      steps.push_back(torch::zeros({}, parameter.device()));
    }
    exp_avgs = zeros_like(parameters);
    exp_avg_sqs = zeros_like(parameters);
  }

  void step(const std::optional<at::Tensor>& grad_scale = {}, const std::optional<at::Tensor>& found_inf = {}) {
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, {}, steps, options.lr(),
                      std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(), options.eps(),
                      /*amsgrad=*/false, /*maximize=*/false, grad_scale, found_inf);
  }

  torch::optim::AdamWOptions options;
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
};

/// Calls the operation of Python's `SGD(fused=True)`.
struct AtenFusedSGD {
  AtenFusedSGD(const std::vector<at::Tensor>& with_gradients, const torch::optim::SGDOptions& options)
      : options(options) {
    for (auto& parameter : with_gradients) {
      parameters.push_back(parameter.detach());
      gradients.push_back(parameter.grad());
    }
    momentum_buffers = zeros_like(parameters);
  }

  void step() {
    at::_fused_sgd_(parameters, gradients, momentum_buffers, options.weight_decay(), options.momentum(), options.lr(),
                    options.dampening(), options.nesterov(), /*maximize=*/false, is_first_step);
    is_first_step = false;
  }

  torch::optim::SGDOptions options;
  std::vector<at::Tensor> parameters, gradients, momentum_buffers;
  bool is_first_step = true;
};

/// Moves the bytes of a step with almost no computation: p, m and v are read and written once, g is read once, 28 bytes
/// per parameter. It uses four long arrays, so that the number of tensors costs nothing.
struct Stream {
  explicit Stream(const ParameterSet& set) {
    for (auto* array : {&p, &g, &m, &v}) *array = torch::rand({static_cast<std::int64_t>(set.elements())});
  }
  void run() const {
    p.add_(g);
    m.neg_();
    v.neg_();
  }
  at::Tensor p, g, m, v;
};

}  // namespace parameter_sets
