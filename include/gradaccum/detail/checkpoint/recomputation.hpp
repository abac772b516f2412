// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/operation_names.hpp>
#include <gradaccum/detail/checkpoint/saved_slot.hpp>
#include <gradaccum/detail/checkpoint/saving_scope.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Runs a part of the forward pass once more, and catches the tensors that it saves.
class Recomputation {
 public:
  struct Rules {
    CheckpointOptions options;
    bool compare_places = false;
  };

  Recomputation(const std::vector<SavedSlot>& slots, std::vector<bool> wanted, const Rules& rules)
      : slots_(slots), wanted_(std::move(wanted)), rules_(rules), tensors_(slots.size()) {
    missing_ = std::ranges::count(wanted_, true);
  }

  void run(const std::function<void()>& part) {
    const Scope scope(*this);
    try {
      part();
    } catch (const Stop&) {
    }
  }

  /// All that was wanted. Throws if the part did not do what it did in the forward pass; `run` tries it once more, to
  /// tell where.
  std::vector<at::Tensor> tensors(const std::function<void(Recomputation&)>& run) {
    if (difference_.empty() && missing_ > 0)
      difference_ = c10::str("it ended after saving ", next_, " tensors of ", slots_.size());
    TORCH_CHECK(difference_.empty(), "checkpoint: the function must do the same when it runs again, but ",
                operation_at(next_, run), difference_);
    return std::move(tensors_);
  }

  /// This thread is recomputing.
  static bool active() { return depth() > 0; }

 private:
  struct Stop {};  // no std::exception, which a user's code may catch

  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(Recomputation& recomputation) : recomputation_(recomputation) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = tensor.tensor_data();  // for gradients that the part takes itself
      recomputation_.add(tensor_);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    Recomputation& recomputation_;
    at::Tensor tensor_;
  };

  class Scope final : SavingScope {
   public:
    explicit Scope(Recomputation& recomputation) : SavingScope("checkpoint"), recomputation_(recomputation) {
      ++depth();
    }
    ~Scope() override { --depth(); }

   private:
    std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override {
      return std::make_unique<Hooks>(recomputation_);
    }
    Recomputation& recomputation_;
  };

  void add(const at::Tensor& tensor) {
    if (!done_) look_at(tensor);
    // Not within a backward pass of the part's own: LibTorch's engine would not survive it.
    if (done_ && torch::autograd::get_current_graph_task_id() == pass_) throw Stop();
  }

  void look_at(const at::Tensor& tensor) {
    const std::size_t slot = next_++;
    if (slot >= slots_.size()) {
      difference_ = c10::str("it saves more than ", slots_.size(), " tensors");
    } else if (slot < stop_at_) {
      difference_ = slots_[slot].difference(SavedSlot(tensor, rules_.options), rules_.compare_places);
    }
    done_ = slot >= stop_at_ || !difference_.empty();
    if (done_ || !wanted_[slot]) return;
    tensors_[slot] = tensor;
    done_ = --missing_ == 0 && rules_.options.early_stop;
  }

  /// "at aten::mul: " for the operation that saves its last tensor as number `count`.
  std::string operation_at(std::size_t count, const std::function<void(Recomputation&)>& run) const {
    const OperationNames names;
    Recomputation again(slots_, std::vector<bool>(slots_.size()), {});
    again.stop_at_ = count - 1;
    try {
      run(again);
    } catch (...) {  // the name of the operation that ran last will do
    }
    return names.last().empty() ? "" : "at " + names.last() + ": ";
  }

  static int& depth() {
    static thread_local int depth = 0;
    return depth;
  }

  const std::vector<SavedSlot>& slots_;
  std::vector<bool> wanted_;
  Rules rules_;
  std::vector<at::Tensor> tensors_;
  std::ptrdiff_t missing_ = 0;
  std::size_t next_ = 0;
  std::size_t stop_at_ = std::size_t(-1);
  bool done_ = false;
  int pass_ = torch::autograd::get_current_graph_task_id();
  std::string difference_;
};

}  // namespace gradaccum::detail
