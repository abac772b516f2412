// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/chain.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
#include <gradaccum/detail/checkpoint/rebuilding_scope.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>
#include <gradaccum/detail/checkpoint/run_checkpointed.hpp>

#include <torch/nn/module.h>

#include <optional>

namespace gradaccum::detail {

GRADACCUM_INLINE void Stage::append(const Stage& other) {
  modules_.insert(modules_.end(), other.modules_.begin(), other.modules_.end());
}

GRADACCUM_INLINE Stage Stage::given(const at::Tensor& context) const {
  Stage stage = *this;
  stage.context_ = context;
  return stage;
}

GRADACCUM_INLINE at::Tensor Stage::forward(std::size_t way, at::Tensor activations) {
  std::optional<RebuildingScope> rebuilding;
  if (way > 0) rebuilding.emplace();
  for (auto& module : modules_)
    activations = context_.defined() ? module.forward(std::move(activations), at::Tensor(context_))
                                     : module.forward(std::move(activations));
  return activations;
}

GRADACCUM_INLINE at::Tensor Stage::forward_in_checkpoint(std::size_t way, at::Tensor activations) {
  const FrozenStatistics frozen(Recomputation::active() ? modules() : std::vector<torch::nn::Module*>());
  return forward(way, std::move(activations));
}

GRADACCUM_INLINE std::vector<torch::nn::Module*> Stage::modules() const {
  std::vector<torch::nn::Module*> modules;
  for (auto& module : modules_) modules.push_back(module.ptr().get());
  return modules;
}

GRADACCUM_INLINE std::vector<torch::nn::Module*> modules_of(const Stages& stages) {
  std::vector<torch::nn::Module*> modules;
  for (auto& stage : stages)
    for (auto* module : stage.modules()) modules.push_back(module);
  return modules;
}

GRADACCUM_INLINE Stages given(const Stages& stages, const at::Tensor& context) {
  Stages all;
  for (auto& stage : stages) all.push_back(stage.given(context));
  return all;
}

GRADACCUM_INLINE Segment Segment::given(const at::Tensor& context) const {
  if (!context.defined()) return *this;
  return {std::make_shared<Stages>(detail::given(*stages_, context)), schedule_, options_};
}

GRADACCUM_INLINE at::Tensor Segment::operator()(at::Tensor activations) const {
  for (auto& item : *schedule_) {
    if (item.segment.empty()) {
      auto& stage = (*stages_)[item.stage];
      activations = options_.check_content ? stage.forward(item.way, std::move(activations))
                                           : stage.forward_in_checkpoint(item.way, std::move(activations));
    } else {
      activations = run_checkpointed(options_, inside(item), std::exchange(activations, {}));
    }
  }
  return activations;
}

GRADACCUM_INLINE std::vector<torch::nn::Module*> Segment::modules() const {
  std::vector<torch::nn::Module*> modules;
  if (!options_.check_content) return modules;
  for (auto& item : *schedule_) {
    const auto more = item.segment.empty() ? (*stages_)[item.stage].modules() : inside(item).modules();
    modules.insert(modules.end(), more.begin(), more.end());
  }
  return modules;
}

}  // namespace gradaccum::detail
