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

/// The properties of a saved and dropped tensor by which its recomputation is verified.
struct SavedSlot {
  SavedSlot(const at::Tensor& tensor, const CheckpointOptions& options);

  /// Describes how the recomputed tensor differs from the saved one; empty if they match.
  std::string difference(const SavedSlot& again, bool compare_places) const;

  TensorTraits traits;
  std::uint64_t place;    // position in the stream of random numbers
  std::uint64_t content;  // 0 unless requested
  bool needed = true;     // the operation that saved it may still unpack it
};

/// Reruns a part of the forward pass, and captures the tensors that it saves.
class Recomputation {
 public:
  struct Rules {
    CheckpointOptions options;
    bool compare_places = false;
  };

  Recomputation(const std::vector<SavedSlot>& slots, std::vector<bool> wanted, const Rules& rules);

  void run(const std::function<void()>& part);

  /// Returns the wanted tensors. Throws if the part did not repeat its forward pass; `run` then reruns it, to name the
  /// operation that differs.
  std::vector<at::Tensor> tensors(const std::function<void(Recomputation&)>& run);

  /// Returns whether this thread is recomputing.
  static bool active() { return depth() > 0; }

 private:
  struct Stop {};  // not a std::exception, which user code may catch
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
