// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/process_group.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// A line for each tensor; `describe` says what of it must be the same on all ranks.
template <class Named, class Describe>
std::string described(const Named& tensors, const Describe& describe) {
  std::string lines;
  for (auto& tensor : tensors) lines += tensor.key() + ": " + describe(tensor.value()) + "\n";
  return lines;
}

/// Throws, on all ranks, where the lines are not the same on all of them; names the first that differs.
inline void check_same_lines(const ProcessGroup& group, const std::string& lines, const char* what) {
  const auto all = group.all_gather(lines);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::istringstream first(all[0]), other(all[rank]);
    std::string expected, got;
    do {
      expected.clear(), got.clear();
      std::getline(first, expected), std::getline(other, got);
    } while (expected == got);
    TORCH_CHECK(false, "Replicas: ", what, " must be the same on all ranks, but rank 0 has '", expected, "', and rank ",
                rank, " has '", got, "'");
  }
}

/// Dtype and shape, and whether it is frozen.
inline std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), tensor.requires_grad() ? "" : " frozen");
}

/// What a model has, by name, and what its optimizer has, in order.
inline void check_same_model(const ProcessGroup& group, const torch::nn::Module& model,
                             const std::vector<at::Tensor>& of_optimizer) {
  auto lines = described(model.named_parameters(), shape_of) + described(model.named_buffers(), shape_of);
  for (auto& parameter : of_optimizer) lines += "in the optimizer: " + shape_of(parameter) + "\n";
  check_same_lines(group, lines, "the model's parameters and buffers");
}

/// The numbers in the parameters, by their checksums.
inline void check_same_parameters(const ProcessGroup& group, const torch::nn::Module& model) {
  const auto numbers = [](const at::Tensor& tensor) { return fingerprint_of(tensor); };
  check_same_lines(group, described(model.named_parameters(), numbers), "the parameters (dtype, shape, checksum)");
}

}  // namespace gradaccum::detail
