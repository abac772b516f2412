// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/memory_fitter.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/fitting/available_memory.hpp>
#include <gradaccum/detail/fitting/out_of_memory.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <sstream>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void MemoryFitter::run(const Limits& limits, const DividedBatch& batch) {
  TORCH_CHECK(limits.budget >= 0, "FitMemory: budget must be > 0, got ", limits.budget);
  TORCH_CHECK(limits.min_rows >= 1 && limits.min_rows <= std::int64_t{1} << 40,
              "FitMemory: min_rows must be >= 1, got ", limits.min_rows);
  has_limit_ = limits.budget > 0;
  for (int of_least = 0, attempts = 0;; ++attempts) {
    const auto looked = looked_;
    const auto failure = attempt(limits, batch, /*may_begin_again=*/attempts < 10);
    if (!failure) return;
    release_kept_memory(batch.device);
    batch.undo();
    release_kept_memory(batch.device);
    if (failure->is_none) {
      looked_ = looked;
      continue;
    }
    ++plan_.replays;
    looked_ = std::min<std::int64_t>(looked_, 1);
    of_least = failure->is_least ? of_least + 1 : 0;
    if (of_least == 0 || (of_least == 1 && failure->bytes == 0)) continue;  // retried once if out of memory
    if (!search_.fails(failure->bytes > 0 ? failure->bytes - limits.budget : 0)) refuse(limits, batch, *failure);
    of_least = 0;
  }
}

GRADACCUM_INLINE void MemoryFitter::find_parts(torch::nn::Module& module,
                                               const std::vector<CheckpointedSequential>& more) {
  search_.find_parts(module, more);
  if (!search_.searches()) return;
  expected_gradient_bytes_ = 0;
  for (auto& parameter : module.parameters())
    if (parameter.requires_grad()) expected_gradient_bytes_ += static_cast<std::int64_t>(parameter.nbytes());
}

GRADACCUM_INLINE std::optional<std::int64_t> MemoryFitter::known_rows(const RowKind& kind) const {
  std::optional<std::int64_t> most;
  for (auto& known : known_) {
    const auto rows = (search_.way().checkpointed ? known.checkpointed : known.plan).fits().rows;
    if (known.kind.covers(kind) && rows > 0) most = std::max(most.value_or(0), rows);
  }
  return most;
}

/// Returns a kind's index. A new kind starts with the rows known for the next larger kind.
GRADACCUM_INLINE std::size_t MemoryFitter::place_of(const RowKind& kind) {
  const auto known = std::ranges::find(known_, kind, &Known::kind);
  if (known != known_.end()) return static_cast<std::size_t>(known - known_.begin());
  const Known* larger = nullptr;
  for (auto& other : known_)
    if (other.kind.covers(kind) && (!larger || other.kind.elements < larger->kind.elements)) larger = &other;
  Known added{kind, {}, {}};
  if (larger) added.plan.begin_with(larger->plan), added.checkpointed.begin_with(larger->checkpointed);
  known_.push_back(std::move(added));
  plan_.layouts.push_back({kind.text});
  return known_.size() - 1;
}

/// Queries the device's memory twice, since the first update may allocate the optimizer's state.
GRADACCUM_INLINE std::int64_t MemoryFitter::budget(const Limits& limits, c10::Device device) {
  if (limits.budget > 0) return plan_.budget = limits.budget;
  if (looked_++ < 2) {
    const auto available = available_memory(device).value_or(0);
    plan_.budget = device.is_cpu() ? available / 5 * 4 : available / 10 * 9;  // the CPU runs out without warning
  }
  return plan_.budget > 0 ? plan_.budget : std::numeric_limits<std::int64_t>::max() / 4;
}

GRADACCUM_INLINE std::int64_t MemoryFitter::gradient_bytes() const {
  return std::max(plan_.gradient_bytes, expected_gradient_bytes_);
}

/// The rows that fit into `bytes` besides gradients and the budget of checkpointed parts.
GRADACCUM_INLINE std::int64_t MemoryFitter::rows_for(Known& known, std::int64_t bytes, std::int64_t least) {
  const auto most = search_.way().most / std::max<std::int64_t>(known.kind.elements, 1);
  return std::min(plan_of(known).rows_for(bytes - gradient_bytes() - search_.budget(), least), std::max(most, least));
}

GRADACCUM_INLINE void MemoryFitter::choose(std::size_t place, std::int64_t bytes, std::int64_t least) {
  search_.share(bytes - gradient_bytes());
  plan_.checkpoint_budget = search_.budget();
  auto& layout = plan_.layouts[place];
  const auto rows = rows_for(known_[place], bytes, least);
  if (rows == layout.rows) return;
  layout.rows = rows;
  layout.predicted_bytes = gradient_bytes() + search_.budget() + plan_of(known_[place]).bytes_for(rows).value_or(0);
  layout.measured_bytes = 0;
}

/// Returns whether rows can be divided into micro-batches of `least` to `most`.
GRADACCUM_INLINE bool goes_in_pieces(std::int64_t rows, std::int64_t most, std::int64_t least) {
  return (rows + most - 1) / most * least <= rows;
}

/// The rows of the next micro-batch: at most `most`, and so that the rest can be divided into `least` to `most`, too.
/// If that is impossible, one micro-batch has more.
GRADACCUM_INLINE std::int64_t rows_of_piece(std::int64_t left, std::int64_t most, std::int64_t least) {
  if (left <= most || left < 2 * least) return left;
  for (auto rows = most; rows >= least; --rows)
    if (goes_in_pieces(left - rows, most, least)) return rows;
  return std::min(most, left - least);
}

/// Runs the batch once. If a window's first micro-batch takes too much, runs the next to see its memory without
/// gradients. The first micro-batch on a device is run without measuring, and undone: a device's libraries allocate
/// workspaces at their first use on a thread and keep them (cuBLAS at the first matrix product, forward and backward).
GRADACCUM_INLINE auto MemoryFitter::attempt(const Limits& limits, const DividedBatch& batch, bool may_begin_again)
    -> std::optional<Failure> {
  const bool warms_up = !batch.device.is_cpu() && warm_device_ != batch.device && MemoryMeter::possible();
  std::optional<MemoryMeter> meter;
  if (!warms_up && MemoryMeter::possible()) meter.emplace();
  const auto bytes = budget(limits, batch.device);
  const auto place = place_of(batch.kind);
  plan_.gradient_bytes = std::max(plan_.gradient_bytes, batch.gradient_bytes);
  plan_.last_rows.clear();
  std::optional<Failure> first;
  for (Piece piece; piece.to < batch.rows;) {
    choose(place, bytes, limits.min_rows);
    const auto rows = plan_.layouts[place].rows;
    piece = {.from = piece.to, .before = batch.gradient_bytes};
    piece.to = piece.from + rows_of_piece(batch.rows - piece.from, rows, limits.min_rows);
    if (may_begin_again && !first && outgrows_first(batch, piece)) return Failure{.is_none = true};
    auto& plan = plan_of(known_[place]);
    auto failure = run(batch, piece, meter ? &*meter : nullptr, plan);
    if (!failure && warms_up) {
      warm_device_ = batch.device;
      return Failure{.is_none = true};
    }
    if (!failure && meter) failure = take_notice(piece, plan);
    const bool is_least =
        rows <= limits.min_rows || piece.rows() > rows || batch.rows < 2 * limits.min_rows;  // cannot be divided
    if (first) first->bytes = std::max(first->bytes, piece.bytes());
    if (first) return first;
    if (failure) {
      failure->is_least = is_least;
      if (!is_least || failure->bytes == 0 || piece.from > 0 || piece.to == batch.rows) return failure;
      first = failure;
    }
    plan_.last_rows.push_back(piece.rows());
    auto& measured = plan_.layouts[place].measured_bytes;
    if (piece.rows() == rows) measured = std::max(measured, piece.bytes());
    time(limits, batch, piece, place, bytes);
  }
  return first;
}

/// Returns whether a loss scale that fits the first micro-batch would be too large for this one.
GRADACCUM_INLINE bool MemoryFitter::outgrows_first(const DividedBatch& batch, const Piece& piece) const {
  return !plan_.last_rows.empty() && piece.rows() > 2 * plan_.last_rows.front() && batch.is_scaled();
}

/// Runs and measures a micro-batch. Returns a failure if it ran out of memory.
GRADACCUM_INLINE auto MemoryFitter::run(const DividedBatch& batch, Piece& piece, MemoryMeter* meter, RowPlan& plan)
    -> std::optional<Failure> {
  if (meter) meter->reset_peak();
  const auto live = meter ? meter->live_bytes(batch.device) : 0;
  piece.before += live;
  const auto start = std::chrono::steady_clock::now();
  try {
    piece.of_kind = batch.run(piece.from, piece.to);
    if (is_timed(batch, piece) && !batch.device.is_cpu())
      c10::impl::VirtualGuardImpl(batch.device.type()).synchronizeDevice(batch.device.index());
  } catch (const std::exception& error) {
    if (!is_out_of_memory(std::current_exception())) throw;
    plan.failed({std::max(piece.rows(), plan.fits().rows), 0});
    return Failure{.rows = piece.rows(), .text = error.what()};
  }
  piece.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!meter) return std::nullopt;
  piece.own = meter->peak_bytes(batch.device) - live;
  plan_.gradient_bytes = std::max(plan_.gradient_bytes, batch.gradient_bytes + meter->live_bytes(batch.device));
  return std::nullopt;
}

/// Records a micro-batch's memory. Returns a failure if it exceeds a given budget. The first of a window is an upper
/// bound, since it allocates gradients, too. Checkpointed parts count by their plan, which may be for more rows.
GRADACCUM_INLINE auto MemoryFitter::take_notice(const Piece& piece, RowPlan& plan) -> std::optional<Failure> {
  const bool first = piece.before == 0;
  const RowPlan::Point point{piece.rows(), std::max({piece.own - search_.bytes(), piece.own / 4, std::int64_t{1}})};
  if (plan_.budget == 0 || piece.bytes() <= plan_.budget) {
    if (piece.of_kind && (!first || plan.empty())) plan.measured(point, !first);
    return std::nullopt;
  }
  plan.failed(point);
  if (!has_limit_) return std::nullopt;  // the device had more than it reported
  return Failure{.rows = piece.rows(), .bytes = piece.bytes()};
}

/// Returns whether the search times a micro-batch. A batch that runs at once cannot become faster.
GRADACCUM_INLINE bool MemoryFitter::is_timed(const DividedBatch& batch, const Piece& piece) const {
  return search_.searches() && (search_.way().checkpointed || piece.rows() < batch.rows);
}

/// Reports a micro-batch's time to the search, if its number of rows stays.
GRADACCUM_INLINE void MemoryFitter::time(const Limits& limits, const DividedBatch& batch, const Piece& piece,
                                         std::size_t place, std::int64_t bytes) {
  auto& known = known_[place];
  if (!is_timed(batch, piece) || piece.rows() != plan_.layouts[place].rows) return;
  if (piece.rows() < batch.rows && rows_for(known, bytes, limits.min_rows) != piece.rows()) return;
  const auto elements = piece.rows() * std::max<std::int64_t>(known.kind.elements, 1);  // longer rows take longer
  search_.took(elements, piece.seconds, piece.rows() < batch.rows);
}

GRADACCUM_INLINE void MemoryFitter::refuse(const Limits& limits, const DividedBatch& batch,
                                           const Failure& failure) const {
  TORCH_CHECK(failure.bytes == 0, "FitMemory: the budget must be at least ", failure.bytes, " bytes, which ",
              failure.rows, " row(s) of ", batch.kind.text, " and the gradients took, got ", limits.budget);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "FitMemory: ", failure.rows, " row(s) of ", batch.kind.text,
                   " ran out of memory twice, and there is nothing to divide: ", failure.text);
}

GRADACCUM_INLINE void MemoryFitter::state(Archive& archive) {
  auto number = static_cast<std::int64_t>(known_.size());
  archive("layouts", number);
  archive("gradient_bytes", plan_.gradient_bytes);
  TORCH_CHECK(number >= 0 && static_cast<std::size_t>(number) <= archive.values().size() + known_.size() &&
                  plan_.gradient_bytes >= 0,
              "FitMemory: the counts of a saved plan must be >= 0 and fit its values, got ", number);
  search_.state(archive);
  if (archive.loading()) known_.assign(static_cast<std::size_t>(number), {}), plan_.layouts.clear();
  for (std::size_t i = 0; i < known_.size(); ++i) {
    auto& [kind, plan, checkpointed] = known_[i];
    auto sizes = c10::Join(" ", kind.sizes);
    const auto name = "layout-" + std::to_string(i) + ".";
    archive(name + "form", kind.form);
    archive(name + "sizes", sizes);
    archive(name + "elements", kind.elements);
    archive(name + "batch", kind.text);
    archive(name + "plan", plan);
    archive(name + "checkpointed", checkpointed);
    if (!archive.loading()) continue;
    std::istringstream numbers(sizes);
    for (std::int64_t size = 0; numbers >> size;) kind.sizes.push_back(size);
    plan_.layouts.push_back({kind.text});
  }
}

}  // namespace gradaccum::detail
