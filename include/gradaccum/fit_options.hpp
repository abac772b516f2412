// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace gradaccum {

/// What becomes of a window that an epoch leaves shorter than the others.
enum class Tail {
  flush,  ///< it is stepped, with its own mean
  drop,   ///< it is forgotten
  carry,  ///< the next epoch, or the next `fit`, goes on with it
};

/// What becomes of a micro-batch whose loss is NaN or infinite.
enum class OnNan {
  stop,    ///< an error that says which one, before the parameters move; on a device, waits for it once a window
  skip,    ///< it is left out, and its window is the mean of the others; on a device, waits at every micro-batch
  ignore,  ///< its gradients go into the window; nobody waits
};

struct FitOptions {
  std::optional<std::int64_t> epochs = {};   ///< passes over the batches; 1 if neither this nor `updates` is given
  std::optional<std::int64_t> updates = {};  ///< stop when the parameters have moved so often; after as many epochs as
                                             ///< that takes, if `epochs` is not given
  Tail tail = Tail::flush;
  OnNan on_nan = OnNan::stop;
  bool smoke = false;  ///< one window of everything, to see that it runs; `evaluate` takes one batch meanwhile
  std::filesystem::path resume = {};  ///< go on from the newest state in this directory, see `ga::save`; from the
                                      ///< beginning where there is none
  bool allow_changes = false;         ///< with `resume`: go on though the model, the data or settings are others
  bool measure_memory = false;  ///< report the peak of tensor memory, by a MemoryMeter; unless LibTorch's profiler is
                                ///< at work. LibTorch may warn then of "memory blocks" that are older than the `fit`
};

/// Where a `fit` is.
struct FitStatus {
  using Clock = std::chrono::steady_clock;

  FitOptions options = {};
  std::int64_t epoch = 0;                    ///< that runs; counted from 0, on from the last `fit`
  std::int64_t epochs = 0;                   ///< that are over, of this `fit`
  std::int64_t batch = 0;                    ///< taken in this epoch
  std::optional<std::int64_t> batches = {};  ///< in an epoch; none in the first, if the range does not tell
  std::int64_t updates = 0, skipped = 0;     ///< windows that moved the parameters, and that did not
  std::int64_t samples = 0;                  ///< taken
  std::int64_t nan_batches = 0;              ///< left out for a loss that is not finite
  std::string first_nan = {};                ///< which was the first
  bool running = false;                      ///< `fit` is at work
  bool stopped = false;                      ///< by `Trainer::stop`
  int signal = 0;                            ///< which one ended it early
  bool together = false;                     ///< with other processes: what ends it waits until all know of it
  bool wants_stop = false;
  int wants_signal = 0;
  std::string resumed_from = {};  ///< the state that it went on from
  bool trained = false;           ///< a window of this epoch moved, or would have but for an overflow
  Clock::time_point start = Clock::now();

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start).count(); }
  /// All that was asked for is done; in the middle of an epoch, too.
  bool done() const;
  void stop() { (together ? wants_stop : stopped) = true; }
  void interrupt(int by) { (together ? wants_signal : signal) = by; }
  void count_window(bool moved, bool overflowed);
  void end_epoch(bool window_has_items);
  /// All but the options, and how it ended.
  void state(Archive& archive);
  /// How much of it is done, in [0, 1]; none while nobody can tell.
  std::optional<double> fraction() const;
};

inline void check(const FitOptions& options) {
  TORCH_CHECK(options.epochs.value_or(0) >= 0, "FitOptions: epochs must be >= 0, got ", *options.epochs);
  TORCH_CHECK(options.updates.value_or(0) >= 0, "FitOptions: updates must be >= 0, got ", *options.updates);
}

inline bool FitStatus::done() const {
  if (stopped || signal != 0 || (options.smoke && updates + skipped > 0)) return true;
  if (options.updates) return updates >= *options.updates || epochs == options.epochs;
  return epochs >= options.epochs.value_or(1);
}

inline void FitStatus::count_window(bool moved, bool overflowed) {
  updates += moved;
  skipped += !moved;
  trained = trained || moved || overflowed;
}

/// Without a number of epochs, batches that bring no update would be gone through for ever.
inline void FitStatus::end_epoch(bool window_has_items) {
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

inline void FitStatus::state(Archive& archive) {
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

inline std::optional<double> FitStatus::fraction() const {
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
