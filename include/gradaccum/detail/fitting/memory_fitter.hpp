// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/memory_meter.hpp>

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum {
class Archive;
}

namespace gradaccum::detail {

/// Finds the fastest way to run a batch through a model with `CheckpointedSequential` parts: keeping everything in
/// small micro-batches, or keeping less in larger ones. Compares the times of micro-batches, which all train the model.
class CheckpointSearch {
 public:
  /// A kind of micro-batch. `most` is the maximum number of elements: rows times elements per row.
  struct Way {
    bool checkpointed = false;
    std::int64_t most = std::numeric_limits<std::int64_t>::max();
  };

  /// Collects the module's parts that have a budget, and `more`, and sets their budgets to 0.
  void find_parts(torch::nn::Module& module, const std::vector<CheckpointedSequential>& more);

  const Way& way() const { return way_; }
  /// Returns true if the search is not finished.
  bool searches() const { return !parts_.empty() && !settled_ && !probing_; }

  /// Starts with the parts at their least, which measures their stages, rather than with everything kept, which may
  /// take many times the budget.
  void probe();
  bool probes() const { return probing_; }
  /// Ends the probe after a micro-batch that took this number of bytes. Keeps everything from now on if the budget may
  /// suffice.
  void end_probe(std::int64_t taken, std::int64_t budget);

  /// Gives three quarters of `bytes` to the parts, if the way is checkpointed and they have no budget yet.
  void share(std::int64_t bytes);
  /// The bytes that all parts together may keep, or 0.
  std::int64_t budget() const;
  /// The bytes planned for the parts in the latest forward pass, if the way is checkpointed; else 0.
  std::int64_t bytes() const;

  /// Records the time of a micro-batch of the most elements that this way allows. `left`: its batch has more rows.
  void took(std::int64_t elements, double seconds, bool left);
  /// Rejects this way, since even the fewest rows take too much memory, by `over` bytes if that is known. Returns false
  /// if there is no other way: everything that can be is recomputed.
  bool fails(std::int64_t over = 0);
  /// Saves or loads the search. The same parts must have been found before.
  void state(Archive& archive);

 private:
  void go(const Way& way, bool settled);
  void set_budget(std::int64_t each);

  std::vector<std::shared_ptr<CheckpointedSequentialImpl>> parts_;
  Way way_, best_;
  double best_seconds_ = std::numeric_limits<double>::infinity();  // per element
  double seconds_ = best_seconds_;                                 // least per element of this way so far
  int timed_ = 0;                                                  // number of times measured
  std::int64_t budget_ = 0;
  bool found_ = false, settled_ = false, probing_ = false;
};

/// Finds the maximum number of rows of one kind per micro-batch, from the memory of earlier ones. Uses no tensors.
///
/// Assumes that memory is the largest of several sums a + b * rows, with a and b >= 0. Then n times the rows take at
/// most n times the bytes, and memory between two measured points is at most the line between them. Growing by these
/// bounds never takes too much. Finally, one more row is tried if the last growth predicts that it fits, which takes at
/// most one row too much. Rows that took too much are not tried again.
class RowPlan {
 public:
  struct Point {
    std::int64_t rows = 0;
    std::int64_t bytes = 0;
  };

  /// Returns the maximum rows for `bytes`, at least `least`. A number of rows that takes 95 % of `bytes` is kept; one
  /// that took more is dropped.
  std::int64_t rows_for(std::int64_t bytes, std::int64_t least);
  /// Returns the bytes that rows are expected to take; nullopt before any measurement.
  std::optional<std::int64_t> bytes_for(std::int64_t rows) const;

  /// Records the bytes of rows. Unless `certain`, they are an upper bound, which counts until a better one is known.
  void measured(Point point, bool certain);
  /// Records rows that took too much; 0 bytes: unknown by how much.
  void failed(Point point);

  bool empty() const { return fits_.rows == 0 && too_many_.rows == 0; }
  const Point& fits() const { return fits_; }  ///< the most rows so far
  /// Saves or loads the plan.
  void state(Archive& archive);

 private:
  std::int64_t fewer_rows(std::int64_t bytes) const;
  std::int64_t more_rows(std::int64_t bytes) const;
  std::int64_t one_more_bytes() const;

  Point fits_;
  Point too_many_;  // the fewest rows that took too much; 0 bytes: unknown by how much
  Point before_;    // fewer rows than fits_, or none
  bool certain_ = false;
};

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

/// Runs batches in micro-batches that fit into memory. Learns their maximum size from the memory that each takes, and
/// from running out of memory.
class MemoryFitter {
 public:
  struct Limits {
    std::int64_t budget = 0;    ///< bytes; 0: found from the device
    std::int64_t min_rows = 1;  ///< fewest rows of a micro-batch, if the batch has as many
  };

  /// Runs a batch. Throws if the smallest micro-batch takes too much memory, after undoing the batch.
  void run(const Limits& limits, const DividedBatch& batch);
  /// Returns the number of rows of this kind per micro-batch; nullopt until it is known.
  std::optional<std::int64_t> known_rows(const RowKind& kind) const;

  /// Finds parts of the model whose budgets may be chosen. Must be called before the first batch.
  void find_parts(torch::nn::Module& module, const std::vector<CheckpointedSequential>& more);

  const MemoryPlan& plan() const { return plan_; }
  void state(Archive& archive);

 private:
  /// A kind of rows, and a plan for each way to run them.
  struct Known {
    RowKind kind;
    RowPlan plan, checkpointed;  // checkpointed: memory without the checkpointed parts
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
    bool is_none = false;    // no failure: restarts to use a measurement, or allocated workspaces
  };

  std::size_t index_of(const RowKind& kind);
  std::int64_t budget(c10::Device device);
  std::int64_t gradient_bytes() const { return std::max(plan_.gradient_bytes, expected_gradient_bytes_); }
  auto& plan_of(auto& known) const { return search_.way().checkpointed ? known.checkpointed : known.plan; }
  std::int64_t rows_for(Known& known, std::int64_t bytes);
  void choose_rows(std::size_t kind, std::int64_t bytes);
  std::optional<Failure> attempt(const DividedBatch& batch, bool may_begin_again);
  std::optional<Failure> run(const DividedBatch& batch, Piece& piece, MemoryMeter* meter, RowPlan& plan);
  bool is_timed(const DividedBatch& batch, const Piece& piece) const;

  Limits limits_;
  std::vector<Known> known_;  // parallel to `plan_.layouts`
  MemoryPlan plan_;
  CheckpointSearch search_;
  std::int64_t expected_gradient_bytes_ = 0;  // assumed until measured, for the search
  std::int64_t queries_ = 0;                  // number of queries of the device's memory
  std::optional<c10::Device> warm_device_;    // device whose libraries have workspaces
};

/// Returns the bytes that this process's control groups (version 1 or 2) still allow; nullopt if they set no limit.
std::optional<std::int64_t> memory_left_by_groups(const std::filesystem::path& groups = "/proc/self/cgroup",
                                                  const std::filesystem::path& mounted = "/sys/fs/cgroup");

/// Returns the bytes that this process can still allocate; nullopt if unknown. On a GPU, free memory and the
/// allocator's free blocks; on the CPU, the minimum of available memory and the limits of control groups and `ulimit
/// -v`.
std::optional<std::int64_t> available_memory(c10::Device device);

/// Returns whether a device, the CPU's allocator or `new` ran out of memory.
bool is_out_of_memory(const std::exception_ptr& error);

/// Frees caches: autocast's casts, and free blocks of a device's caching allocator.
void release_kept_memory(c10::Device device);

/// Returns the result of `make`. If it runs out of memory, frees caches and calls it once more.
template <class Make>
auto with_memory(c10::Device device, Make&& make) {
  try {
    return make();
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) throw;
  }
  release_kept_memory(device);
  return make();
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/fitting/memory_fitter.ipp>
#endif
