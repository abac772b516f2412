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

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum {
class Archive;
}

namespace gradaccum::detail {

/// A batch that is run in micro-batches.
struct DividedBatch {
  RowKind kind;
  std::int64_t rows = 0;
  c10::Device device;               ///< device whose memory counts
  std::int64_t gradient_bytes = 0;  ///< bytes of gradients held already
  /// Runs the rows [from, to). Returns true if they are of the batch's kind, and not narrowed to less padding.
  c10::function_ref<bool(std::int64_t from, std::int64_t to)> run;
  c10::function_ref<void()> undo;  ///< undoes the micro-batches that ran
  /// Returns whether a loss scale is in use: micro-batches, weighted by the first, may not then have many more rows.
  c10::function_ref<bool()> is_scaled;
};

/// Runs batches in micro-batches that fit into memory. Learns how large these may be from the memory that each takes,
/// and from those that run out of it.
class MemoryFitter {
 public:
  struct Limits {
    std::int64_t budget = 0;    ///< bytes; 0: found from the device
    std::int64_t min_rows = 1;  ///< fewest rows of a micro-batch, if the batch has as many
  };

  /// Runs a batch. Throws if the smallest micro-batch takes too much memory, after undoing the batch.
  void run(const Limits& limits, const DividedBatch& batch);
  /// The number of rows of this kind that training runs at once; nothing until it is known.
  std::optional<std::int64_t> known_rows(const RowKind& kind) const;

  /// Finds parts of the model whose budgets may be chosen. Must be called before the first batch.
  void find_parts(torch::nn::Module& module, const std::vector<CheckpointedSequential>& more);

  const MemoryPlan& plan() const { return plan_; }
  void state(Archive& archive);

 private:
  /// A kind of rows, and a plan for each way to run them.
  struct Known {
    RowKind kind;
    RowPlan plan, checkpointed;  // checkpointed: memory besides the checkpointed parts
  };
  /// A micro-batch, and the memory and time that it took.
  struct Piece {
    std::int64_t from = 0, to = 0;
    std::int64_t before = 0, own = 0;  // bytes of the update held before it, and more in it
    double seconds = 0;
    bool of_kind = true;  // rows are of the batch's kind
    std::int64_t rows() const { return to - from; }
    std::int64_t bytes() const { return before + own; }
  };
  /// A micro-batch that took too much memory.
  struct Failure {
    std::int64_t rows = 0;
    bool is_least = false;   // cannot be divided
    std::int64_t bytes = 0;  // taken; 0: it ran out of memory
    std::string text = {};   // the allocator's message
    bool is_none = false;    // no failure: restarts with what was learned or allocated
  };

  std::size_t place_of(const RowKind& kind);
  std::int64_t budget(const Limits& limits, c10::Device device);
  std::int64_t gradient_bytes() const;
  RowPlan& plan_of(Known& known) { return search_.way().checkpointed ? known.checkpointed : known.plan; }
  std::int64_t rows_for(Known& known, std::int64_t bytes, std::int64_t least);
  void choose(std::size_t place, std::int64_t bytes, std::int64_t least);
  std::optional<Failure> attempt(const Limits& limits, const DividedBatch& batch, bool may_begin_again);
  bool outgrows_first(const DividedBatch& batch, const Piece& piece) const;
  std::optional<Failure> run(const DividedBatch& batch, Piece& piece, MemoryMeter* meter, RowPlan& plan);
  std::optional<Failure> take_notice(const Piece& piece, RowPlan& plan);
  void time(const Limits& limits, const DividedBatch& batch, const Piece& piece, std::size_t place, std::int64_t bytes);
  bool is_timed(const DividedBatch& batch, const Piece& piece) const;
  [[noreturn]] void refuse(const Limits& limits, const DividedBatch& batch, const Failure& failure) const;

  std::vector<Known> known_;  // parallel to `plan_.layouts`
  MemoryPlan plan_;
  CheckpointSearch search_;
  std::int64_t expected_gradient_bytes_ = 0;  // assumed until measured, for the search
  bool has_limit_ = false;                    // the budget was given, not found
  std::int64_t looked_ = 0;                   // number of queries of the device's memory
  std::optional<c10::Device> warm_device_;    // device whose libraries have workspaces
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/memory_fitter.ipp>
#endif
