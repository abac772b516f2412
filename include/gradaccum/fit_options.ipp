// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/fit_options.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/training_state.hpp>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace gradaccum {

GRADACCUM_INLINE void check(const FitOptions& options) {
  TORCH_CHECK(options.epochs.value_or(0) >= 0, "FitOptions: epochs must be >= 0, got ", *options.epochs);
  TORCH_CHECK(options.updates.value_or(0) >= 0, "FitOptions: updates must be >= 0, got ", *options.updates);
  TORCH_CHECK(options.samples.value_or(0) >= 0, "FitOptions: samples must be >= 0, got ", *options.samples);
  TORCH_CHECK(!options.time || options.time->count() >= 0, "FitOptions: time must be >= 0 s, got ",
              options.time->count());
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

GRADACCUM_INLINE void FitStatus::stop(std::string why) {
  if (!together) return stop_all(std::move(why));
  wants_stop = true;
  if (stop_reason.empty()) stop_reason = std::move(why);
}

GRADACCUM_INLINE void FitStatus::stop_all(std::string why) {
  stopped = true;
  if (stop_reason.empty()) stop_reason = std::move(why);
}

/// Once it is said it stays: whoever asks after that hears the same, however late it is. However short the time, it is
/// enough for a window.
GRADACCUM_INLINE void FitStatus::stop_at_limits() {
  if (options.samples && samples >= *options.samples) stop(fmt::format("after {} samples", *options.samples));
  if (options.time && updates + skipped > 0 && seconds() >= options.time->count())
    stop(fmt::format("after {:.6g} s", options.time->count()));
}

GRADACCUM_INLINE bool FitStatus::done() const {
  if (stopped || signal != 0 || (options.smoke && updates + skipped > 0)) return true;
  if (options.updates && updates >= *options.updates) return true;
  return options.has_limit() ? epochs == options.epochs : epochs >= options.epochs.value_or(1);
}

GRADACCUM_INLINE void FitStatus::count_window(bool moved, bool overflowed) {
  updates += moved;
  skipped += !moved;
  trained = trained || moved || overflowed;
}

/// Without a number of epochs, batches that bring no update would be gone through for ever.
GRADACCUM_INLINE void FitStatus::end_epoch(bool window_has_items) {
  TORCH_CHECK(options.epochs || !options.has_limit() || done() || trained || window_has_items, "Trainer: fit must ",
              options.updates ? c10::str("make ", *options.updates, " updates") : "go on to its limit", ", but epoch ",
              epoch, " (counted from 0) brought ", options.updates ? "none" : "no update",
              ": the batches are empty, have losses without items, or give no gradient "
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
  archive("validations", detail::ValidationHistory{validations});
  if (!archive.loading()) return;
  TORCH_CHECK(
      std::min({epoch, epochs, batch, batches.value_or(0), updates, skipped, samples, nan_batches}) >= 0 && so_far >= 0,
      "Trainer: the counts of a saved fit must be >= 0");
  start = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(so_far));
}

GRADACCUM_INLINE std::optional<double> FitStatus::fraction() const {
  if (done()) return 1;
  std::optional<double> most;  // what ends it first is furthest
  const auto add = [&most](double part) { most = std::max(part, most.value_or(0)); };
  if (options.updates) add(static_cast<double>(updates) / static_cast<double>(*options.updates));
  if (options.samples.value_or(0) > 0) add(static_cast<double>(samples) / static_cast<double>(*options.samples));
  if (options.time) add(seconds() / options.time->count());
  if (batches.value_or(0) > 0 && (options.epochs || !options.has_limit())) {
    const auto of_epoch = static_cast<double>(std::min(batch, *batches)) / static_cast<double>(*batches);
    add((static_cast<double>(epochs) + of_epoch) / static_cast<double>(options.epochs.value_or(1)));
  }
  if (most) most = std::min(*most, 1.0);
  return most;
}

}  // namespace gradaccum
