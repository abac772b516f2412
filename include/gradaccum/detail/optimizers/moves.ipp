// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/moves.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE Scratch* Moves::scratch_of(at::Device device) {
  const auto is_its = [&](const auto& scratch) { return scratch->device() == device; };
  const auto found = std::find_if(scratches_.begin(), scratches_.end(), is_its);
  if (found != scratches_.end()) return found->get();
  return scratches_.emplace_back(std::make_unique<Scratch>(device)).get();
}

GRADACCUM_INLINE void Moves::prepare() {
  for (auto& [scratch, move] : moves_) {
    scratch->begin_turn();
    move->take(*scratch);
  }
  for (auto& scratch : scratches_) scratch->allocate();
}

GRADACCUM_INLINE void Moves::run() {
  for (auto& [scratch, move] : moves_) {
    scratch->begin_turn();
    move->take(*scratch);
    move->run();
  }
  for (auto& move : without_scratch_) move();
}

}  // namespace gradaccum::detail
