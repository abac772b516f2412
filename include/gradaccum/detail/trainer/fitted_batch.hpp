// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/trainer/any_batches.hpp>
#include <gradaccum/detail/trainer/parts.hpp>

#include <cstdint>

namespace gradaccum {
class TrainerBase;
}

namespace gradaccum::detail {

/// A batch that a Trainer with `FitMemory` takes, which it is a friend of: in micro-batches that fit into memory, which
/// fill one window, or several.
class FittedBatch {
 public:
  FittedBatch(TrainerBase& trainer, const AnyBatch& batch);
  /// True if the parameters moved.
  bool run();

 private:
  std::int64_t end_of_window(std::int64_t from) const;
  void run_window(std::int64_t from, std::int64_t to);
  bool has_all_updates() const;

  TrainerBase& trainer_;
  TrainerParts& parts_;
  const AnyBatch& batch_;
  RowKind kind_;
  std::int64_t rows_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/fitted_batch.ipp>
#endif
