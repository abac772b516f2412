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

/// Lets normalisation layers in a module move copies of their running statistics for a scope: a forward pass that is
/// only repeated must not count twice.
///
/// The layers' handles are exchanged rather than the values put back: values are saved for backward, which would take
/// the writing for a change.
class [[nodiscard]] FrozenStatistics {
 public:
  /// `start`: what the copies begin with (from `copied_statistics`), if not with what there is.
  explicit FrozenStatistics(const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& start = {});
  FrozenStatistics(const FrozenStatistics&) = delete;
  FrozenStatistics& operator=(const FrozenStatistics&) = delete;
  ~FrozenStatistics();

 private:
  FrozenStatistics() = default;  // if the other throws, the destructor runs all the same

  std::vector<std::pair<at::Tensor*, at::Tensor>> exchanged_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/frozen_statistics.ipp>
#endif
