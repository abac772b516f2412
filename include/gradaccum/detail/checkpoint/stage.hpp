// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
#include <gradaccum/detail/checkpoint/rebuilding_scope.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// One or more successive modules of a chain that keep what their backward needs in the same way, and are run again
/// together.
class Stage {
 public:
  explicit Stage(torch::nn::AnyModule module) : modules_{std::move(module)} {}

  void append(const Stage& other) { modules_.insert(modules_.end(), other.modules_.begin(), other.modules_.end()); }
  std::size_t size() const { return modules_.size(); }

  /// `way` 0 keeps what LibTorch keeps, 1 makes results of cheap operations again.
  at::Tensor forward(std::size_t way, at::Tensor activations) {
    std::optional<RebuildingScope> rebuilding;
    if (way > 0) rebuilding.emplace();
    for (auto& module : modules_) activations = module.forward(std::move(activations));
    return activations;
  }

  /// As a part of a checkpoint: when that runs again, running statistics stay where they are. Their copies are gone
  /// when the stage is through, and so count as its own.
  at::Tensor forward_in_checkpoint(std::size_t way, at::Tensor activations) {
    const FrozenStatistics frozen(Recomputation::active() ? modules() : std::vector<torch::nn::Module*>());
    return forward(way, std::move(activations));
  }

  std::vector<torch::nn::Module*> modules() const {
    std::vector<torch::nn::Module*> modules;
    for (auto& module : modules_) modules.push_back(module.ptr().get());
    return modules;
  }

 private:
  std::vector<torch::nn::AnyModule> modules_;
};

using Stages = std::vector<Stage>;

inline std::vector<torch::nn::Module*> modules_of(const Stages& stages) {
  std::vector<torch::nn::Module*> modules;
  for (auto& stage : stages)
    for (auto* module : stage.modules()) modules.push_back(module);
  return modules;
}

}  // namespace gradaccum::detail
