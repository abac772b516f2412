// SPDX-License-Identifier: Apache-2.0
// Ends a fit at its limits, reports on it, and saves its progress.
#pragma once

#include <gradaccum/detail/training/fit_state.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Records the stop once, so that later calls agree even though time passes. `.time` allows at least one window, so
/// that each of a chain of resumed jobs trains.
GRADACCUM_INLINE void FitState::stop_at_limits() {
  if (options.samples && samples >= *options.samples) stop(fmt::format("after {} samples", *options.samples));
  if (options.time && windows > 0 && seconds_of_call() >= options.time->count())
    stop(fmt::format("after {:.6g} s", options.time->count()));
}

GRADACCUM_INLINE void FitState::end_epoch() {
  TORCH_CHECK(batch > 0 || batches.value_or(0) == 0 || done(), "Trainer: epoch ", epoch,
              " (counted from 0) had no batches, but should have had ", *batches,
              "; a range that can be iterated only once lasts for one epoch");
  ++epochs;
  if (!batches) batches = batch;
  batch = 0;
  trained = false;
}

GRADACCUM_INLINE FitReport FitState::report() const {
  FitReport report{.epochs = epochs,
                   .updates = updates,
                   .skipped = skipped,
                   .samples = samples,
                   .seconds = seconds(),
                   .unit = options.unit,
                   .items = items(),
                   .flops = flops(),
                   .peak_flops = peak_flops(),
                   .resumed_from = resumed_from,
                   .stopped = stop_reason,
                   .signal = signal(),
                   .nan_batches = nan_batches,
                   .first_nan = first_nan,
                   .rejected = rejected,
                   .first_rejected = first_rejected,
                   .validations = validations};
  if (!options.resume.empty() && resumed_from.empty())
    report.notes.push_back(options.resume.string() + " has no state to resume from, so this fit began anew");
  if (options.counts_flops() && windows > 0 && flops() == 0)
    report.notes.push_back(
        "no FLOP were counted: the objective has no products, convolutions or attention, or it runs an ExportedModel");
  if (at_rate_0 * 10 > windows)
    report.notes.push_back(
        fmt::format("the learning rate was 0 in {} of {} updates, which moved nothing", at_rate_0, windows));
  report.samples_per_second = static_cast<double>(report.samples) / report.seconds;
  report.flops_per_second = report.flops / (report.seconds - flops_from_);
  return report;
}

GRADACCUM_INLINE void FitState::state(Archive& archive) {
  auto so_far = seconds();
  archive("epoch", epoch);
  archive("epochs", epochs);
  archive("batch", batch);
  archive("batches", batches);
  archive("updates", updates);
  archive("skipped", skipped);
  archive("samples", samples);
  archive("nan_batches", nan_batches);
  archive("first_nan", first_nan);
  auto of_rejected = rejected > 0 ? std::optional(rejected) : std::nullopt;
  auto first_of_rejected = rejected > 0 ? std::optional(first_rejected) : std::nullopt;
  archive("rejected", of_rejected);
  archive("first_rejected", first_of_rejected);
  rejected = of_rejected.value_or(0);
  first_rejected = first_of_rejected.value_or("");
  auto of_items = items_ > 0 ? std::optional(items_) : std::nullopt;
  auto of_flops = flops_ > 0 ? std::optional(flops_) : std::nullopt;
  auto from = flops_ > 0 ? std::optional(flops_from_) : std::nullopt;
  archive("items", of_items);
  archive("flops", of_flops);
  archive("flops_from", from);
  archive("trained", trained);
  archive("seconds", so_far);
  items_ = of_items.value_or(0);
  if (archive.loading()) {
    const bool continues = options.counts_flops() && of_flops && from;
    flops_ = continues ? *of_flops : 0;
    flops_from_ = continues ? *from : so_far;
  }
  archive("validations", ValidationHistory{validations});
  if (!archive.loading()) return;
  TORCH_CHECK(
      std::min({epoch, epochs, batch, batches.value_or(0), updates, skipped, samples, nan_batches, rejected}) >= 0 &&
          so_far >= 0 && is_finite(items_) && is_finite(flops_) && items_ >= 0 && flops_ >= 0 && flops_from_ >= 0 &&
          flops_from_ <= so_far,
      "Trainer: the counts of a saved fit must be finite and >= 0");
  if (archive.changes_allowed()) {
    const auto& ranks = archive.ranks();
    const auto of_ranks = archive.of_ranks<std::int64_t>("batch");
    for (const auto each : of_ranks)
      TORCH_CHECK(each >= 0 && each < std::numeric_limits<std::int64_t>::max() / (ranks.saved + 1),
                  "Trainer: each rank of a saved fit must have a batch >= 0 that an epoch can have, got ", each);
    batch = std::ranges::max(of_ranks);  // equal on all ranks, because a Schedule plans with it
    if (ranks.are_others()) {
      batch = std::accumulate(of_ranks.begin(), of_ranks.end(), ranks.loading - 1) / ranks.loading;
      batches.reset();
    }
  }
  start_ = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(so_far));
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
