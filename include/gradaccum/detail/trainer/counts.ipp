// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/counts.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE void Counts::state(Archive& archive) {
  auto next = *this;
  archive("updates", next.updates);
  archive("epochs", next.epochs);
  TORCH_CHECK(next.updates >= 0 && next.epochs >= 0, "Trainer: updates and epochs of a state must be >= 0, got ",
              next.updates, " and ", next.epochs);
  *this = next;
}

}  // namespace gradaccum::detail
