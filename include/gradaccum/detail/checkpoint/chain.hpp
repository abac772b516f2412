// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// One or more successive modules of a chain that keep what their backward needs in the same way, and are run again
/// together.
class Stage {
 public:
  explicit Stage(torch::nn::AnyModule module) : modules_{std::move(module)} {}

  void append(const Stage& other);
  /// The same stage, whose modules take this tensor, too; an undefined one: none.
  Stage given(const at::Tensor& context) const;
  std::size_t size() const { return modules_.size(); }

  /// `way` 0 keeps what LibTorch keeps, 1 makes results of cheap operations again.
  at::Tensor forward(std::size_t way, at::Tensor activations);

  /// As a part of a checkpoint: when that runs again, running statistics stay where they are. Their copies are gone
  /// when the stage is through, and so count as its own.
  at::Tensor forward_in_checkpoint(std::size_t way, at::Tensor activations);

  std::vector<torch::nn::Module*> modules() const;

 private:
  std::vector<torch::nn::AnyModule> modules_;
  at::Tensor context_;
};

using Stages = std::vector<Stage>;

std::vector<torch::nn::Module*> modules_of(const Stages& stages);
Stages given(const Stages& stages, const at::Tensor& context);

/// Successive stages of a chain with the schedule by which they run: a function of a tensor. A schedule's segments are
/// functions of the same kind, checkpointed; so they nest, and each runs again by its own part of the schedule.
class Segment {
 public:
  Segment(std::shared_ptr<Stages> stages, std::shared_ptr<const Schedule> schedule, const CheckpointOptions& options)
      : stages_(std::move(stages)), schedule_(std::move(schedule)), options_(options) {}

  at::Tensor operator()(at::Tensor activations) const;
  /// The same, of stages that are given it.
  Segment given(const at::Tensor& context) const;

  /// Those whose running statistics begin anew when it runs again, since what they save is compared. Otherwise the
  /// stages take care of that.
  std::vector<torch::nn::Module*> modules() const;

 private:
  Segment inside(const ScheduleItem& item) const { return {stages_, {schedule_, &item.segment}, options_}; }

  std::shared_ptr<Stages> stages_;
  std::shared_ptr<const Schedule> schedule_;  // with the whole schedule behind it
  CheckpointOptions options_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/chain.ipp>
#endif
