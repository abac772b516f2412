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

/// Successive modules of a chain that save tensors for backward in the same way and are recomputed together.
class Stage {
 public:
  explicit Stage(torch::nn::AnyModule module) : modules_{std::move(module)} {}

  void append(const Stage& other);
  /// Returns a copy whose modules also take `context`, unless that is undefined.
  Stage given(const at::Tensor& context) const;
  std::size_t size() const { return modules_.size(); }

  /// Runs the modules. `way` 0 saves what LibTorch saves; `way` 1 recomputes results of cheap operations in backward.
  at::Tensor forward(std::size_t way, at::Tensor activations);

  /// Runs the modules inside a checkpoint. A recomputation updates copies of the running statistics. The copies are
  /// freed when the stage ends, so they count as its own memory.
  at::Tensor forward_in_checkpoint(std::size_t way, at::Tensor activations);

  std::vector<torch::nn::Module*> modules() const;

 private:
  std::vector<torch::nn::AnyModule> modules_;
  at::Tensor context_;
};

using Stages = std::vector<Stage>;

std::vector<torch::nn::Module*> modules_of(const Stages& stages);
Stages given(const Stages& stages, const at::Tensor& context);

/// A function of a tensor that runs successive stages of a chain by a schedule. Each segment of the schedule is such a
/// function, too, and is checkpointed: segments nest, and each is recomputed by its own part of the schedule.
class Segment {
 public:
  Segment(std::shared_ptr<Stages> stages, std::shared_ptr<const Schedule> schedule, const CheckpointOptions& options)
      : stages_(std::move(stages)), schedule_(std::move(schedule)), options_(options) {}

  at::Tensor operator()(at::Tensor activations) const;
  /// Returns a copy whose stages also take `context`, unless that is undefined.
  Segment given(const at::Tensor& context) const;

  /// The modules whose running statistics a recomputation resets to those before the forward pass, since saved contents
  /// are compared. Empty without `check_content`: the stages then freeze their own statistics.
  std::vector<torch::nn::Module*> modules() const;

 private:
  Segment inside(const ScheduleItem& item) const { return {stages_, {schedule_, &item.segment}, options_}; }

  std::shared_ptr<Stages> stages_;
  std::shared_ptr<const Schedule> schedule_;  // shares ownership of the whole schedule
  CheckpointOptions options_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/chain.ipp>
#endif
