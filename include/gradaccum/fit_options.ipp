// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/fit_options.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/training_state.hpp>

#include <c10/util/Exception.h>

#include <algorithm>

namespace gradaccum {

GRADACCUM_INLINE void check(const FitOptions& options) {
  TORCH_CHECK(options.epochs.value_or(0) >= 0, "FitOptions: epochs must be >= 0, got ", *options.epochs);
  TORCH_CHECK(options.updates.value_or(0) >= 0, "FitOptions: updates must be >= 0, got ", *options.updates);
}

GRADACCUM_INLINE std::optional<std::filesystem::path> ResumeFrom::newest() const {
  return empty() ? std::nullopt : newest_(directory_);
}

GRADACCUM_INLINE Archive ResumeFrom::open(const std::filesystem::path& folder, bool allow_changes,
                                          const detail::Peers* peers) const {
  if (open_) return open_(folder, allow_changes, peers);
  const auto refuse = [&] {
    TORCH_CHECK(false, "FitOptions: rank 0 resumes from ", folder.string(), "; `resume` must be given on all ranks");
  };
  detail::run_on_all(peers, refuse);
  return {};
}

GRADACCUM_INLINE double FitStatus::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

GRADACCUM_INLINE bool FitStatus::done() const {
  if (stopped || signal != 0 || (options.smoke && updates + skipped > 0)) return true;
  if (options.updates) return updates >= *options.updates || epochs == options.epochs;
  return epochs >= options.epochs.value_or(1);
}

GRADACCUM_INLINE void FitStatus::count_window(bool moved, bool overflowed) {
  updates += moved;
  skipped += !moved;
  trained = trained || moved || overflowed;
}

/// Without a number of epochs, batches that bring no update would be gone through for ever.
GRADACCUM_INLINE void FitStatus::end_epoch(bool window_has_items) {
  TORCH_CHECK(options.epochs || !options.updates || done() || trained || window_has_items, "Trainer: fit must make ",
              *options.updates, " updates, but epoch ", epoch,
              " (counted from 0) brought none: the batches are empty, have losses without items, or give no gradient "
              "to the optimizer's parameters; was it made for this model?");
  TORCH_CHECK(batch > 0 || batches.value_or(0) == 0 || done(), "Trainer: epoch ", epoch,
              " (counted from 0) brought no batch, and was to bring ", *batches,
              "; a range that can be gone through only once is good for one epoch");
  ++epochs;
  if (!batches) batches = batch;
  batch = 0;
  trained = false;
}

GRADACCUM_INLINE void FitStatus::state(Archive& archive) {
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
  archive("trained", trained);
  archive("seconds", so_far);
  if (!archive.loading()) return;
  TORCH_CHECK(
      std::min({epoch, epochs, batch, batches.value_or(0), updates, skipped, samples, nan_batches}) >= 0 && so_far >= 0,
      "Trainer: the counts of a saved fit must be >= 0");
  start = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(so_far));
}

GRADACCUM_INLINE std::optional<double> FitStatus::fraction() const {
  if (done()) return 1;
  std::optional<double> by_updates, by_batches;
  if (options.updates) by_updates = static_cast<double>(updates) / static_cast<double>(*options.updates);
  if (batches.value_or(0) > 0 && (options.epochs || !options.updates)) {
    const auto of_epoch = static_cast<double>(std::min(batch, *batches)) / static_cast<double>(*batches);
    by_batches = (static_cast<double>(epochs) + of_epoch) / static_cast<double>(options.epochs.value_or(1));
  }
  if (!by_updates || !by_batches) return by_updates ? by_updates : by_batches;
  return std::max(*by_updates, *by_batches);
}

}  // namespace gradaccum
