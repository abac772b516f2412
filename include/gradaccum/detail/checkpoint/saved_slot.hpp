// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/content_hash.hpp>
#include <gradaccum/detail/checkpoint/random_state.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string>

namespace gradaccum::detail {

/// What is kept of a tensor that the forward pass saved and forgot: enough to know it again.
struct SavedSlot {
  SavedSlot(const at::Tensor& tensor, const CheckpointOptions& options)
      : traits(tensor),
        place(options.preserve_rng ? RandomState::place() : 0),
        content(options.check_content ? content_hash(tensor) : 0) {}

  /// What tells the recomputed tensor from the one that was saved; empty if it is the same.
  std::string difference(const SavedSlot& again, bool compare_places) const {
    if (again.traits != traits) return c10::str("a saved tensor was ", traits, " and is ", again.traits);
    if (compare_places && again.place != place)
      return "random numbers were drawn elsewhere in between (is a module in another mode? did another thread draw? "
             "One at "
             "a time may; where this part draws none, preserve_rng = false)";
    if (again.content != 0 && again.content != content)
      return c10::str("the contents of a saved tensor (", traits, ") are not the same");
    return "";
  }

  TensorTraits traits;
  std::uint64_t place;    // in the stream of random numbers
  std::uint64_t content;  // 0: not asked for
  bool needed = true;     // the operation that saved it may still ask for it
};

}  // namespace gradaccum::detail
