// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/memory_fitter.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/fitting/available_memory.hpp>
#include <gradaccum/detail/fitting/out_of_memory.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <limits>

namespace gradaccum::detail {

GRADACCUM_INLINE void MemoryFitter::run(const Limits& limits, const DividedBatch& batch) {
  TORCH_CHECK(limits.budget >= 0, "FitMemory: budget must be > 0, got ", limits.budget);
  TORCH_CHECK(limits.min_rows >= 1, "FitMemory: min_rows must be >= 1, got ", limits.min_rows);
  least_ = 0;
  for (int failures = 0; !attempt(limits, batch);) {
    batch.undo();
    release_kept_memory(batch.device);
    ++plan_.replays;
    looked_ = std::min<std::int64_t>(looked_, 1);
    failures = limits.divides(failed_.rows()) ? 0 : failures + 1;
    if (least_ == 0 && failures <= 1) continue;
    if (!search_.fails(least_ - limits.budget)) refuse(limits, batch);
    failures = 0;
    least_ = 0;
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
  const auto found = known_.find({kind.form, kind.elements});
  if (found == known_.end() || found->second.plan.fits().rows == 0) return std::nullopt;
  return found->second.plan.fits().rows;
}

/// Rows with fewer elements take no more than those with more.
GRADACCUM_INLINE MemoryFitter::Known& MemoryFitter::known(const RowKind& kind) {
  const auto [place, is_new] = known_.try_emplace(Key(kind.form, kind.elements));
  if (!is_new) return place->second;
  const auto larger = std::next(place);
  if (larger != known_.end() && larger->first.first == kind.form) place->second.plan.begin_with(larger->second.plan);
  place->second.place = plan_.layouts.size();
  plan_.layouts.push_back({kind.text});
  return place->second;
}

/// The first update may take memory for the optimizer's state: so the device is looked at again for the second.
GRADACCUM_INLINE std::int64_t MemoryFitter::budget(const Limits& limits, c10::Device device) {
  if (limits.budget > 0) return plan_.budget = limits.budget;
  if (looked_++ < 2) {
    const auto available = available_memory(device).value_or(0);
    plan_.budget = device.is_cpu() ? available / 5 * 4 : available / 10 * 9;  // the CPU's end comes without a warning
  }
  return plan_.budget > 0 ? plan_.budget : std::numeric_limits<std::int64_t>::max() / 4;
}

/// Of what is left, at most so many; and no less than `least` stays for the next one.
GRADACCUM_INLINE std::int64_t rows_of_piece(std::int64_t left, std::int64_t most, std::int64_t least) {
  if (left <= most || left < 2 * least) return left;
  return std::min(most, left - least);
}

GRADACCUM_INLINE bool MemoryFitter::attempt(const Limits& limits, const DividedBatch& batch) {
  std::optional<MemoryMeter> meter;
  if (MemoryMeter::possible()) meter.emplace();
  const auto bytes = budget(limits, batch.device);
  auto& known = this->known(batch.kind);
  plan_.last_rows.clear();
  for (Piece piece; piece.to < batch.rows;) {
    choose(known, bytes, limits.min_rows);
    piece.from = piece.to;
    piece.to = piece.from + rows_of_piece(batch.rows - piece.from, plan_.layouts[known.place].rows, limits.min_rows);
    if (!runs(batch, piece, meter ? &*meter : nullptr, plan_of(known))) return false;
    if (meter && !fits(limits, batch, piece, known)) return false;
    if (least_ > 0 && piece.from > 0) return false;
    plan_.last_rows.push_back(piece.rows());
    time(limits, batch, piece, known, bytes);
  }
  return least_ == 0;
}

/// What checkpointed parts may keep is theirs; rows have the rest.
GRADACCUM_INLINE std::int64_t MemoryFitter::rows_for(Known& known, std::int64_t bytes, std::int64_t least) {
  const auto left = bytes - gradient_bytes();
  search_.share(left);
  plan_.checkpoint_budget = search_.budget();
  auto& plan = plan_of(known);
  if (plan.empty() && search_.way().checkpointed) plan.begin_with(known.plan);
  return std::min(plan.rows_for(left - search_.budget(), least), std::max(search_.way().most_rows, least));
}

GRADACCUM_INLINE void MemoryFitter::choose(Known& known, std::int64_t bytes, std::int64_t least) {
  auto& layout = plan_.layouts[known.place];
  const auto rows = rows_for(known, bytes, least);
  if (rows == layout.rows) return;
  layout.rows = rows;
  layout.predicted_bytes = gradient_bytes() + search_.budget() + plan_of(known).bytes_for(rows).value_or(0);
  layout.measured_bytes = 0;
}

/// Of a number of rows that stays.
GRADACCUM_INLINE void MemoryFitter::time(const Limits& limits, const DividedBatch& batch, const Piece& piece,
                                         Known& known, std::int64_t bytes) {
  if (!search_.searches() || piece.rows() != plan_.layouts[known.place].rows) return;
  if (piece.rows() < batch.rows && rows_for(known, bytes, limits.min_rows) != piece.rows()) return;
  const auto elements = std::max<std::int64_t>(batch.kind.elements, 1);  // longer rows take longer
  search_.took(piece.rows(), piece.seconds / static_cast<double>(elements), piece.rows() < batch.rows);
}

/// False where it ran out of memory.
GRADACCUM_INLINE bool MemoryFitter::runs(const DividedBatch& batch, Piece& piece, MemoryMeter* meter, RowPlan& plan) {
  if (meter) {
    meter->reset_peak();
    piece.before = meter->live_bytes(batch.device);
  }
  const auto start = std::chrono::steady_clock::now();
  try {
    batch.run(piece.from, piece.to);
    if (search_.searches() && !batch.device.is_cpu())
      c10::impl::VirtualGuardImpl(batch.device.type()).synchronizeDevice(batch.device.index());
  } catch (const std::exception& error) {
    if (!is_out_of_memory(std::current_exception())) throw;
    ran_out_ = error.what();
    failed_ = piece;
    plan.failed({std::max(piece.rows(), plan.fits().rows), 0});
    return false;
  }
  piece.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (meter) {
    piece.own = meter->peak_bytes(batch.device) - piece.before;
    plan_.gradient_bytes = batch.gradient_bytes + meter->live_bytes(batch.device);
  }
  return true;
}

/// Takes notice of what a micro-batch took. The first of a window took the memory of gradients, too.
GRADACCUM_INLINE bool MemoryFitter::fits(const Limits& limits, const DividedBatch& batch, const Piece& piece,
                                         Known& known) {
  const auto total = batch.gradient_bytes + piece.before + piece.own;
  auto& layout = plan_.layouts[known.place];
  if (piece.rows() == layout.rows) layout.measured_bytes = std::max(layout.measured_bytes, total);
  const bool first = batch.gradient_bytes + piece.before == 0;
  auto& plan = plan_of(known);
  const RowPlan::Point point{piece.rows(), std::max<std::int64_t>(piece.own - search_.bytes(), 1)};
  if (plan_.budget == 0 || total <= plan_.budget) {
    if (!first || plan.empty()) plan.measured(point, !first);
    return true;
  }
  if (limits.divides(piece.rows())) plan.failed(point);
  if (limits.budget == 0) return true;  // there was more than the device told
  failed_ = piece;
  if (limits.divides(piece.rows())) return false;
  least_ = std::max(least_, total);
  return first;  // the next one will show what it takes beside gradients
}

GRADACCUM_INLINE void MemoryFitter::refuse(const Limits& limits, const DividedBatch& batch) {
  TORCH_CHECK(least_ == 0, "FitMemory: the budget must be at least ", least_, " bytes, which ",
              std::min(limits.min_rows, batch.rows), " row(s) of ", batch.kind.text, " and the gradients took, got ",
              limits.budget);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "FitMemory: ", std::min(limits.min_rows, batch.rows), " row(s) of ",
                   batch.kind.text, " ran out of memory twice, and there is nothing to divide: ", ran_out_);
}

GRADACCUM_INLINE void archive_plan(Archive& archive, const std::string& name, RowPlan& plan) {
  auto fits = plan.fits(), too_many = plan.too_many();
  archive(name + "rows", fits.rows);
  archive(name + "bytes", fits.bytes);
  archive(name + "too_many_rows", too_many.rows);
  archive(name + "too_many_bytes", too_many.bytes);
  TORCH_CHECK(std::min({fits.rows, fits.bytes, too_many.rows, too_many.bytes}) >= 0,
              "FitMemory: the rows and bytes of a saved plan must be >= 0");
  if (archive.loading()) plan.set(fits, too_many);
}

GRADACCUM_INLINE void MemoryFitter::state(Archive& archive) {
  auto number = static_cast<std::int64_t>(known_.size());
  archive("layouts", number);
  archive("gradient_bytes", plan_.gradient_bytes);
  TORCH_CHECK(number >= 0 && plan_.gradient_bytes >= 0, "FitMemory: the counts of a saved plan must be >= 0");
  search_.state(archive);
  std::vector<std::pair<RowKind, Known>> all;
  for (auto& [key, known] : known_) all.push_back({{key.first, key.second, plan_.layouts[known.place].batch}, known});
  if (archive.loading()) known_.clear(), plan_.layouts.clear(), all.clear();
  for (std::int64_t i = 0; i < number; ++i) {
    auto [kind, known] = archive.loading() ? std::pair<RowKind, Known>() : all[static_cast<std::size_t>(i)];
    const auto name = "layout-" + std::to_string(i) + ".";
    archive(name + "form", kind.form);
    archive(name + "elements", kind.elements);
    archive(name + "batch", kind.text);
    archive_plan(archive, name, known.plan);
    archive_plan(archive, name + "checkpointed.", known.checkpointed);
    if (!archive.loading()) continue;
    auto& loaded = this->known(kind);
    loaded.plan = known.plan, loaded.checkpointed = known.checkpointed;
  }
}

}  // namespace gradaccum::detail
