// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/saving_scope.hpp>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE SavedSlot::SavedSlot(const at::Tensor& tensor, const CheckpointOptions& options)
    : traits(tensor),
      place(options.preserve_rng ? RandomState::place() : 0),
      content(options.check_content ? content_hash(tensor) : 0) {}

GRADACCUM_INLINE std::string SavedSlot::difference(const SavedSlot& again, bool compare_places) const {
  if (again.traits != traits) return c10::str("a saved tensor was ", traits, " and is ", again.traits);
  if (compare_places && again.place != place)
    return "random numbers were drawn elsewhere in between (is a module in another mode? did another thread draw? One "
           "at a time may; where this part draws none, preserve_rng = false)";
  if (again.content != 0 && again.content != content)
    return c10::str("the contents of a saved tensor (", traits, ") are not the same");
  return "";
}

/// Records the name of LibTorch's operation that ran last on this thread.
class [[nodiscard]] OperationNames {
 public:
  OperationNames()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&note).scopes({at::RecordScope::FUNCTION}))) {
    last().clear();
  }
  OperationNames(const OperationNames&) = delete;
  OperationNames& operator=(const OperationNames&) = delete;
  ~OperationNames() { at::removeCallback(handle_); }

  static std::string& last() {
    static thread_local std::string name;
    return name;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& operation) {
    last() = operation.name();
    return nullptr;
  }

  at::CallbackHandle handle_;
};

class Recomputation::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(Recomputation& recomputation) : recomputation_(recomputation) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.tensor_data();  // for gradients that the part computes itself
    recomputation_.add(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  Recomputation& recomputation_;
  at::Tensor tensor_;
};

class Recomputation::Scope final : SavingScope {
 public:
  explicit Scope(Recomputation& recomputation) : SavingScope("checkpoint"), recomputation_(recomputation) { ++depth(); }
  ~Scope() override { --depth(); }

 private:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override {
    return std::make_unique<Hooks>(recomputation_);
  }
  Recomputation& recomputation_;
};

GRADACCUM_INLINE Recomputation::Recomputation(const std::vector<SavedSlot>& slots, std::vector<bool> wanted,
                                              const Rules& rules)
    : slots_(slots),
      wanted_(std::move(wanted)),
      rules_(rules),
      tensors_(slots.size()),
      missing_(std::ranges::count(wanted_, true)),
      pass_(torch::autograd::get_current_graph_task_id()) {}

GRADACCUM_INLINE void Recomputation::run(const std::function<void()>& part) {
  const Scope scope(*this);
  try {
    part();
  } catch (const Stop&) {
  }
}

GRADACCUM_INLINE std::vector<at::Tensor> Recomputation::tensors(const std::function<void(Recomputation&)>& run) {
  if (difference_.empty() && missing_ > 0)
    difference_ = c10::str("it ended after saving ", next_, " tensors of ", slots_.size());
  TORCH_CHECK(difference_.empty(), "checkpoint: the function must do the same when it runs again, but ",
              operation_at(next_, run), difference_);
  return std::move(tensors_);
}

GRADACCUM_INLINE void Recomputation::add(const at::Tensor& tensor) {
  if (!done_) look_at(tensor);
  // Does not throw within a backward pass that the part itself runs: LibTorch's engine would not survive it.
  if (done_ && torch::autograd::get_current_graph_task_id() == pass_) throw Stop();
}

GRADACCUM_INLINE void Recomputation::look_at(const at::Tensor& tensor) {
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

/// Names the operation that saves tensor number `count`, counted from 1, as "at aten::mul: ".
GRADACCUM_INLINE std::string Recomputation::operation_at(std::size_t count,
                                                         const std::function<void(Recomputation&)>& run) const {
  const OperationNames names;
  Recomputation again(slots_, std::vector<bool>(slots_.size()), {});
  again.stop_at_ = count - 1;
  try {
    run(again);
  } catch (...) {  // the name of the last operation is enough
  }
  return names.last().empty() ? "" : "at " + names.last() + ": ";
}

GRADACCUM_INLINE int& Recomputation::depth() {
  static thread_local int depth = 0;
  return depth;
}

}  // namespace gradaccum::detail
