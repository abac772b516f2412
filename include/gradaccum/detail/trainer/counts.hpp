// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <c10/util/Exception.h>

#include <cstdint>

namespace gradaccum::detail {

/// What a Trainer counts over all its fits.
struct Counts {
  std::int64_t updates = 0, epochs = 0;

  void state(Archive& archive) {
    auto next = *this;
    archive("updates", next.updates);
    archive("epochs", next.epochs);
    TORCH_CHECK(next.updates >= 0 && next.epochs >= 0, "Trainer: updates and epochs of a state must be >= 0, got ",
                next.updates, " and ", next.epochs);
    *this = next;
  }
};

}  // namespace gradaccum::detail
