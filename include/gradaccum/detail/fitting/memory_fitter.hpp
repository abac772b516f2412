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

/// A batch that goes through in micro-batches.
struct DividedBatch {
  RowKind kind;
  std::int64_t rows = 0;
  c10::Device device;               ///< whose memory counts
  std::int64_t gradient_bytes = 0;  ///< that are held already
  /// A micro-batch of these rows. True if they are of the batch's kind, and not padded to less.
  c10::function_ref<bool(std::int64_t from, std::int64_t to)> run;
  c10::function_ref<void()> undo;  ///< as if none had run
  /// Micro-batches weigh against the first, in 16 bits and times a loss scale, and are not to have many more rows.
  c10::function_ref<bool()> is_scaled;
};

/// Runs batches in micro-batches that fit into memory, and finds out how large these may be: from what each takes, and
/// from those that run out of it.
class MemoryFitter {
 public:
  struct Limits {
    std::int64_t budget = 0;    ///< bytes; 0: what the device has
    std::int64_t min_rows = 1;  ///< of a micro-batch, where the batch has as many
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
  /// Of one kind of rows: one plan for each way to go.
  struct Known {
    RowKind kind;
    RowPlan plan, checkpointed;  // the second: of what is taken beside checkpointed parts
  };
  /// A micro-batch, and what it took.
  struct Piece {
    std::int64_t from = 0, to = 0;
    std::int64_t before = 0, own = 0;  // bytes: of the update that were held before, and beyond that
    double seconds = 0;
    bool of_kind = true;  // of the batch's
    std::int64_t rows() const { return to - from; }
    std::int64_t bytes() const { return before + own; }
  };
  /// A micro-batch that took too much.
  struct Failure {
    std::int64_t rows = 0;
    bool is_least = false;   // there is nothing to divide
    std::int64_t bytes = 0;  // that it took; 0: it ran out of memory
    std::string text = {};   // what the allocator said then
    bool is_none = false;    // what has been found or allocated is to be used from the first micro-batch on
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

  std::vector<Known> known_;  // and `plan_.layouts` at the same places
  MemoryPlan plan_;
  CheckpointSearch search_;
  std::int64_t expected_gradient_bytes_ = 0;  // before they were seen, where that matters
  bool has_limit_ = false;                    // a budget was given, and not only found
  std::int64_t looked_ = 0;                   // how often at what the device has
  std::optional<c10::Device> warm_device_;    // its libraries have allocated their workspaces
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/memory_fitter.ipp>
#endif
