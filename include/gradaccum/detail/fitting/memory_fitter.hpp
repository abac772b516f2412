// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/fitting/checkpoint_search.hpp>
#include <gradaccum/detail/fitting/row_kind.hpp>
#include <gradaccum/detail/fitting/row_plan.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/memory_plan.hpp>

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum {
class Archive;
}

namespace gradaccum::detail {

/// A batch that goes through in micro-batches.
struct DividedBatch {
  RowKind kind;
  std::int64_t rows = 0;
  c10::Device device;                                               ///< whose memory counts
  std::int64_t gradient_bytes = 0;                                  ///< that are held already
  c10::function_ref<void(std::int64_t from, std::int64_t to)> run;  ///< a micro-batch of these rows
  c10::function_ref<void()> undo;                                   ///< as if none had run
};

/// Runs batches in micro-batches that fit into memory, and finds out how large these may be: from what each takes, and
/// from those that run out of it.
class MemoryFitter {
 public:
  struct Limits {
    std::int64_t budget = 0;    ///< bytes; 0: what the device has
    std::int64_t min_rows = 1;  ///< of a micro-batch, where the batch has as many
    bool divides(std::int64_t rows) const { return rows >= 2 * min_rows; }
  };

  /// Throws where the least micro-batch takes too much; then the batch is undone.
  void run(const Limits& limits, const DividedBatch& batch);
  /// How many rows of this kind go at once in training; none while that is not known.
  std::optional<std::int64_t> known_rows(const RowKind& kind) const;

  /// Before the first batch: parts of the model whose budget may be chosen, too.
  void find_parts(torch::nn::Module& module, const std::vector<CheckpointedSequential>& more);

  const MemoryPlan& plan() const { return plan_; }
  void state(Archive& archive);

 private:
  /// By form and by elements of a row.
  using Key = std::pair<std::string, std::int64_t>;
  struct Known {
    RowPlan plan, checkpointed;  // the second: of what is taken beside checkpointed parts
    std::size_t place = 0;       // in `plan_.layouts`
  };
  /// A micro-batch, and what it took.
  struct Piece {
    std::int64_t from = 0, to = 0;
    std::int64_t before = 0, own = 0;  // bytes: held before, and beyond that
    double seconds = 0;
    std::int64_t rows() const { return to - from; }
  };

  Known& known(const RowKind& kind);
  std::int64_t budget(const Limits& limits, c10::Device device);
  bool attempt(const Limits& limits, const DividedBatch& batch);
  /// Of the way that the search is on.
  RowPlan& plan_of(Known& known) const { return search_.way().checkpointed ? known.checkpointed : known.plan; }
  std::int64_t gradient_bytes() const { return std::max(plan_.gradient_bytes, expected_gradient_bytes_); }
  std::int64_t rows_for(Known& known, std::int64_t bytes, std::int64_t least);
  void choose(Known& known, std::int64_t bytes, std::int64_t least);
  bool runs(const DividedBatch& batch, Piece& piece, MemoryMeter* meter, RowPlan& plan);
  bool fits(const Limits& limits, const DividedBatch& batch, const Piece& piece, Known& known);
  void time(const Limits& limits, const DividedBatch& batch, const Piece& piece, Known& known, std::int64_t bytes);
  void refuse(const Limits& limits, const DividedBatch& batch);

  std::map<Key, Known> known_;
  MemoryPlan plan_;
  CheckpointSearch search_;
  std::int64_t expected_gradient_bytes_ = 0;  // before they were seen, where that matters
  std::int64_t looked_ = 0;                   // how often at what the device has
  Piece failed_;                              // the last that did not go through
  std::string ran_out_;                       // what the allocator said
  std::int64_t least_ = 0;                    // bytes that the least micro-batches took, where that was too much
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/memory_fitter.ipp>
#endif
