// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <cstdint>

namespace gradaccum::detail {

/// What a Trainer counts over all its fits.
struct Counts {
  std::int64_t updates = 0, epochs = 0;

  void state(Archive& archive);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/counts.ipp>
#endif
