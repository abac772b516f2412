// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_plan.hpp>
#include <gradaccum/detail/checkpoint/planner.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
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

/// The properties on which the memory of a forward and backward pass depends.
class PlanScope {
 public:
  PlanScope(const Stages& stages, const at::Tensor& input, const at::Tensor& context);

  /// Returns whether a plan for this scope fits `other`: no dimension of `other` is larger, and all else is equal.
  bool covers(const PlanScope& other) const;

 private:
  at::DimVector shape_, context_shape_;
  std::vector<std::int64_t> order_;
  at::Device device_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<bool> flags_;
};

/// Plans of a chain for a memory budget: one for each kind of input, made when it is first seen.
class PlannedChain {
 public:
  PlannedChain(const Stages& stages, std::int64_t budget, const CheckpointOptions& options)
      : stages_(stages), budget_(budget), options_(options) {}

  struct Planned {
    PlanScope scope;
    Segment chain;
    CheckpointPlan plan;
  };

  /// `context` is a second input of all stages; it may be undefined.
  std::shared_ptr<const Planned> plan_for(const at::Tensor& input, const at::Tensor& context);
  std::shared_ptr<const Planned> latest() const;

 private:
  std::shared_ptr<const Planned> make(PlanScope scope, const at::Tensor& input, const at::Tensor& context) const;

  Stages stages_;
  std::int64_t budget_;
  CheckpointOptions options_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Planned>> plans_;
  std::shared_ptr<const Planned> latest_;
};

/// Records the allocations of a scope, so that some of them can be left out of the sums later.
class AllocationLog final : public MemoryLedger {
 public:
  using MemoryLedger::MemoryLedger;

  void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override;

  /// Returns whether the memory of a live tensor was allocated in this scope.
  bool has(const at::Tensor& tensor) const;

  /// The current position in the log.
  std::size_t now() const;

  /// Excludes the memory of a live tensor from the sums, from its allocation on.
  void leave_out(const at::Tensor& tensor);

  struct Bytes {
    std::int64_t live = 0, peak = 0;
  };
  /// The bytes live at `to`, and the most live at any time since `from`.
  Bytes between(std::size_t from, std::size_t to) const;

 private:
  struct Entry {
    std::int64_t bytes;  // negative if freed
    std::size_t born;    // index of a freed block's allocation
  };

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::unordered_map<void*, std::size_t> born_;
  std::vector<std::size_t> skipped_steps_;
};

/// Logs the allocations of a scope, and passes them on to an enclosing ledger.
class [[nodiscard]] AllocationScope {
 public:
  /// `impossible` is the error message inside LibTorch's profiler.
  explicit AllocationScope(const char* impossible =
                               "CheckpointedSequential: must not plan inside LibTorch's profiler, which uses the same "
                               "slot; run one forward pass before it starts");
  AllocationLog& operator*() const { return *log_; }
  AllocationLog* operator->() const { return log_.get(); }

 private:
  std::shared_ptr<AllocationLog> log_;
  c10::DebugInfoGuard guard_;
};

/// The cost of a stage, and the data that measuring its neighbours needs.
struct StageProfile {
  StageCost cost;
  at::Tensor output;                 ///< the next stage's input
  at::Tensor gradient_layout;        ///< layout of the output's gradient
  at::Tensor input_gradient_layout;  ///< layout of the input's gradient; undefined if it has none
};

/// Measures the cost of a stage by running it alone, forward and backward. Excludes its input, gradients of parameters,
/// and the output of a chain's last stage.
///
/// `gradient_layout` is the layout of the output's gradient; if undefined, that of the output.
StageProfile profile_of(Stage& stage, const at::Tensor& input, const at::Tensor& gradient_layout, bool last,
                        const CheckpointOptions& options);

/// Merges a stage into the previous one if neither saves the tensor between them, such as a linear layer and its
/// dropout: apart, that tensor would count although it is long freed. Also merges stages that change their input in
/// place, and stages before the first that needs gradients, since the input that a segment keeps counts where an
/// operation needs it.
Stages merged(const Stages& stages, const at::Tensor& input);

/// Measures the cost of each stage for inputs like this one, by running it a few times. Leaves gradients of parameters
/// unchanged; the caller restores random generators and running statistics.
StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/chain.ipp>
#endif
