// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace gradaccum::detail {

/// Copies of the running statistics of normalisation layers.
std::vector<at::Tensor> copied_statistics(const std::vector<torch::nn::Module*>& modules);

/// Makes normalisation layers update copies of their running statistics for a scope, so that a repeated forward pass
/// does not count twice.
///
/// Exchanges the layers' handles rather than restoring values: autograd saves the values, and would take restoring them
/// for an in-place change.
class [[nodiscard]] FrozenStatistics {
 public:
  /// `start` (from `copied_statistics`) holds the copies' initial values; if empty, they start from the current ones.
  explicit FrozenStatistics(const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& start = {});
  FrozenStatistics(const FrozenStatistics&) = delete;
  FrozenStatistics& operator=(const FrozenStatistics&) = delete;
  ~FrozenStatistics();

 private:
  FrozenStatistics() = default;  // makes the destructor run even if the other constructor throws

  std::vector<std::pair<at::Tensor*, at::Tensor>> exchanged_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/frozen_statistics.ipp>
#endif
