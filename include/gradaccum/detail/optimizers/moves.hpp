// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/scratch.hpp>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A part of an optimizer's step on a device. Allocates memory only in its constructor and in `take`.
class Move {
 public:
  virtual ~Move() = default;
  virtual void take(Scratch& scratch) = 0;
  virtual void run() = 0;
};

/// One step of an optimizer. All device memory is allocated before any parameter changes, so that running out of it
/// leaves nothing half-stepped.
class Moves {
 public:
  void add(at::Device device, std::unique_ptr<Move> move) { moves_.emplace_back(scratch_of(device), std::move(move)); }
  /// Adds a part that needs no device memory.
  void add(std::function<void()> move) { without_scratch_.push_back(std::move(move)); }

  void prepare();
  void run();

 private:
  Scratch* scratch_of(at::Device device);
  /// Moves on devices, which run first, since those on the host may wait for them.
  std::vector<std::pair<Scratch*, std::unique_ptr<Move>>> moves_;
  std::vector<std::function<void()>> without_scratch_;
  std::vector<std::unique_ptr<Scratch>> scratches_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/moves.ipp>
#endif
