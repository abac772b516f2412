// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/run_checkpointed.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>
#include <gradaccum/detail/checkpoint/saving_scope.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <mutex>

namespace gradaccum::detail {

/// A checkpointed part of the forward pass: the function that reruns it, and the properties of the tensors that it
/// saved. The operations of the autograd graph share ownership of it.
class CheckpointFrame {
 public:
  CheckpointFrame(const CheckpointOptions& options, std::vector<torch::nn::Module*> modules,
                  std::function<void()> again)
      : rules_{options}, modules_(std::move(modules)), again_(std::move(again)), state_(options.preserve_rng) {
    if (options.check_content) statistics_ = copied_statistics(modules_);  // saved by operations, so compared
  }

  /// Ends the forward pass.
  void complete() {
    rules_.compare_places = state_.finish();
    complete_ = true;
  }

  /// Records the properties of a tensor that an operation saves, and drops the tensor. Returns its slot.
  std::size_t add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    slots_.emplace_back(tensor, rules_.options);
    return slots_.size() - 1;
  }

  /// Returns the tensor of a slot. The first call of a backward pass recomputes all tensors that are still needed.
  at::Tensor take(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    const int pass = torch::autograd::get_current_graph_task_id();
    const auto found = std::ranges::find(passes_, pass, &Pass::id);
    auto tensors = found == passes_.end() ? nullptr : found->tensors.lock();
    if (!tensors && pass != not_in_backward) tensors = begin(pass);
    if (tensors && (*tensors)[slot].defined()) return std::exchange((*tensors)[slot], {});
    std::vector<bool> only(slots_.size());
    only[slot] = true;
    return std::move(recompute(only)[slot]);
  }

  /// Releases a slot whose operation is done or destroyed.
  void drop(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    slots_[slot].needed = false;
    for (auto& pass : passes_)
      if (auto tensors = pass.tensors.lock(); tensors && slot < tensors->size()) (*tensors)[slot].reset();
  }

  const SavedSlot& slot(std::size_t i) const { return slots_[i]; }

 private:
  static constexpr int not_in_backward = -1;
  using Tensors = std::vector<at::Tensor>;
  struct Pass {
    int id;
    std::weak_ptr<Tensors> tensors;
  };

  std::shared_ptr<Tensors> begin(int pass) {
    std::vector<bool> needed;
    for (auto& slot : slots_) needed.push_back(slot.needed);
    auto tensors = std::make_shared<Tensors>(recompute(needed));
    // The callback owns the tensors, and is destroyed with the pass even if that fails: tensors never taken are freed.
    torch::autograd::Engine::get_default_engine().queue_callback([tensors] {});
    std::erase_if(passes_, [](auto& each) { return each.tensors.expired(); });
    passes_.push_back({pass, tensors});
    return tensors;
  }

  std::vector<at::Tensor> recompute(const std::vector<bool>& wanted) {
    const auto run = [this](Recomputation& recomputation) {
      const ForwardState::Scope state(state_);
      const FrozenStatistics frozen(modules_, statistics_);
      recomputation.run(again_);
    };
    auto rules = rules_;
    rules.options.early_stop |= !complete_;  // inside the function, which computes gradients itself
    Recomputation recomputation(slots_, wanted, rules);
    run(recomputation);
    return recomputation.tensors(run);
  }

  Recomputation::Rules rules_;
  std::vector<torch::nn::Module*> modules_;
  std::vector<at::Tensor> statistics_;
  std::function<void()> again_;
  ForwardState state_;
  bool complete_ = false;
  std::recursive_mutex mutex_;  // backward passes may run on several threads
  std::vector<SavedSlot> slots_;
  std::vector<Pass> passes_;
};

/// Replaces the tensors that operations save by slots of a frame, for a scope.
class [[nodiscard]] CheckpointScope final : SavingScope {
 public:
  explicit CheckpointScope(std::shared_ptr<CheckpointFrame> frame)
      : SavingScope("checkpoint"), frame_(std::move(frame)) {}

 private:
  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
    Hooks(const Hooks&) = delete;
    Hooks& operator=(const Hooks&) = delete;
    ~Hooks() override {
      if (slot_ != none) frame_->drop(slot_);
    }
    void call_pack_hook(const at::Tensor& tensor) override {
      version_ = TensorVersion(tensor);
      slot_ = frame_->add(tensor);
    }
    at::Tensor call_unpack_hook() override {
      TORCH_CHECK(!version_.changed(), "checkpoint: a tensor that backward needs (", frame_->slot(slot_).traits,
                  ") must not change in place after it was saved; clone it before");
      return frame_->take(slot_);
    }

   private:
    static constexpr std::size_t none = std::size_t(-1);
    std::shared_ptr<CheckpointFrame> frame_;
    TensorVersion version_;
    std::size_t slot_ = none;
  };

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(frame_); }

  std::shared_ptr<CheckpointFrame> frame_;
};

GRADACCUM_INLINE void run_in_frame(const CheckpointOptions& options, const std::vector<torch::nn::Module*>& modules,
                                   KeptTensors& inputs, std::function<void()> again,
                                   c10::function_ref<void()> forward) {
  const auto frame = std::make_shared<CheckpointFrame>(options, modules, std::move(again));
  {
    const FrozenStatistics frozen(Recomputation::active() ? modules : std::vector<torch::nn::Module*>());
    const CheckpointScope scope(frame);
    forward();
  }
  inputs.check_unchanged();
  frame->complete();
}

}  // namespace gradaccum::detail
