// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// What is kept of a tensor that the forward pass saved and forgot: enough to know it again.
struct SavedSlot {
  SavedSlot(const at::Tensor& tensor, const CheckpointOptions& options);

  /// What tells the recomputed tensor from the one that was saved; empty if it is the same.
  std::string difference(const SavedSlot& again, bool compare_places) const;

  TensorTraits traits;
  std::uint64_t place;    // in the stream of random numbers
  std::uint64_t content;  // 0: not asked for
  bool needed = true;     // the operation that saved it may still ask for it
};

/// Runs a part of the forward pass once more, and catches the tensors that it saves.
class Recomputation {
 public:
  struct Rules {
    CheckpointOptions options;
    bool compare_places = false;
  };

  Recomputation(const std::vector<SavedSlot>& slots, std::vector<bool> wanted, const Rules& rules);

  void run(const std::function<void()>& part);

  /// All that was wanted. Throws if the part did not do what it did in the forward pass; `run` tries it once more, to
  /// tell where.
  std::vector<at::Tensor> tensors(const std::function<void(Recomputation&)>& run);

  /// This thread is recomputing.
  static bool active() { return depth() > 0; }

 private:
  struct Stop {};  // no std::exception, which a user's code may catch
  class Hooks;
  class Scope;

  void add(const at::Tensor& tensor);
  void look_at(const at::Tensor& tensor);
  std::string operation_at(std::size_t count, const std::function<void(Recomputation&)>& run) const;
  static int& depth();

  const std::vector<SavedSlot>& slots_;
  std::vector<bool> wanted_;
  Rules rules_;
  std::vector<at::Tensor> tensors_;
  std::ptrdiff_t missing_;
  std::size_t next_ = 0;
  std::size_t stop_at_ = std::size_t(-1);
  bool done_ = false;
  int pass_;
  std::string difference_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/recomputation.ipp>
#endif
