// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/run_checkpointed.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>
#include <gradaccum/detail/checkpoint/stage.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Successive stages of a chain with the schedule by which they run: a function of a tensor. A schedule's segments are
/// functions of the same kind, checkpointed; so they nest, and each runs again by its own part of the schedule.
class Segment {
 public:
  Segment(std::shared_ptr<Stages> stages, std::shared_ptr<const Schedule> schedule, const CheckpointOptions& options)
      : stages_(std::move(stages)), schedule_(std::move(schedule)), options_(options) {}

  at::Tensor operator()(at::Tensor activations) const {
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

  /// Those whose running statistics begin anew when it runs again, since what they save is compared. Otherwise the
  /// stages take care of that.
  std::vector<torch::nn::Module*> modules() const {
    std::vector<torch::nn::Module*> modules;
    if (!options_.check_content) return modules;
    for (auto& item : *schedule_) {
      const auto more = item.segment.empty() ? (*stages_)[item.stage].modules() : inside(item).modules();
      modules.insert(modules.end(), more.begin(), more.end());
    }
    return modules;
  }

 private:
  Segment inside(const ScheduleItem& item) const { return {stages_, {schedule_, &item.segment}, options_}; }

  std::shared_ptr<Stages> stages_;
  std::shared_ptr<const Schedule> schedule_;  // with the whole schedule behind it
  CheckpointOptions options_;
};

}  // namespace gradaccum::detail
