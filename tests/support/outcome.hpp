// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace testing {

/// Returns whether shape, dtype and bytes are equal, also for NaNs.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same_bits(a[i], b[i])) return false;
  return true;
}

/// The results of a training step.
struct Outcome {
  std::vector<at::Tensor> outputs, gradients, buffers;
  at::Tensor random;
};

/// Names the results that differ in a bit; empty if none does.
inline std::string difference(const Outcome& a, const Outcome& b) {
  return std::string(same_bits(a.outputs, b.outputs) ? "" : "outputs ") +
         (same_bits(a.gradients, b.gradients) ? "" : "gradients ") +
         (same_bits(a.buffers, b.buffers) ? "" : "buffers ") + (same_bits(a.random, b.random) ? "" : "random");
}

inline at::Tensor random_state() { return at::globalContext().defaultGenerator(at::kCPU).get_state().clone(); }

/// A loss to which every element of a tensor contributes differently.
inline at::Tensor uneven_sum(const at::Tensor& tensor) {
  const auto weights = torch::arange(1, tensor.numel() + 1, at::kDouble).cos();
  return (tensor.to(at::kDouble).reshape(-1) * weights).sum();
}

inline at::Tensor uneven_sum(const std::vector<at::Tensor>& tensors) {
  auto sum = torch::zeros({}, at::kDouble);
  for (auto& tensor : tensors)
    if (tensor.requires_grad()) sum = sum + uneven_sum(tensor);
  return sum;
}

inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (auto& tensor : tensors) result.push_back(tensor.defined() ? tensor.detach().clone() : at::Tensor());
  return result;
}

/// Returns the gradients of leaves, and removes them there.
inline std::vector<at::Tensor> take_gradients(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> result;
  for (auto& leaf : leaves) result.push_back(std::exchange(leaf.mutable_grad(), at::Tensor()));
  return result;
}

inline std::vector<at::Tensor> all_of(const at::Tensor& one) { return {one}; }
inline std::vector<at::Tensor> all_of(std::vector<at::Tensor> tensors) { return tensors; }

/// One forward and backward pass: `forward()` returns a tensor or a vector of them.
template <class Forward>
Outcome outcome(Forward&& forward, const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& buffers = {}) {
  torch::manual_seed(7);
  const auto outputs = all_of(forward());
  uneven_sum(outputs).backward();
  return {copies(outputs), take_gradients(leaves), copies(buffers), random_state()};
}

}  // namespace testing
