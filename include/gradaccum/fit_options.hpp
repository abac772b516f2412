// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: training

#include <gradaccum/archive.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/metrics.hpp>

#include <filesystem>

namespace gradaccum {

namespace detail {
class Loop;
class Communicator;

/// See training_state.hpp.
std::optional<std::filesystem::path> newest_state(const std::filesystem::path& path);
Archive open_state(const std::filesystem::path& folder, bool allow_changes, const Communicator* peers);
}  // namespace detail

/// Selects how `fit` treats an incomplete window at the end of an epoch.
enum class Tail {
  flush,  ///< makes an update with the mean over the window so far
  drop,   ///< discards it
  carry,  ///< continues it in the next epoch, or the next `fit`
};

/// Selects how a Trainer treats a micro-batch with a non-finite loss, and a window with non-finite gradients.
///
/// With a loss scaler, non-finite gradients are left to it: it skips the window and lowers its scale.
enum class OnNan {
  stop,    ///< throws before the update, and names the batch; on a device, synchronizes once per window
  skip,    ///< leaves out the micro-batch, or the window; on a device, synchronizes at every micro-batch and window
  ignore,  ///< makes the update; does not synchronize
};

/// The directory from whose newest state a `fit` resumes. Converts from paths and strings.
///
/// Holds pointers to the functions that read states, so that programs without `.resume` do not compile them.
class ResumeFrom {
 public:
  ResumeFrom() = default;
  template <class Path>
  requires(!std::same_as<std::remove_cvref_t<Path>, ResumeFrom> && std::convertible_to<Path, std::filesystem::path>)
      ResumeFrom(Path&& directory)  // NOLINT(google-explicit-constructor): a path is one
      : directory_(std::forward<Path>(directory)), newest_(&detail::newest_state), open_(&detail::open_state) {}

  operator const std::filesystem::path&() const { return directory_; }  // NOLINT(google-explicit-constructor): as above
  bool empty() const { return directory_.empty(); }
  std::string string() const { return directory_.string(); }

 private:
  friend class detail::Loop;

  std::filesystem::path directory_;
  decltype(&detail::newest_state) newest_ = nullptr;
  decltype(&detail::open_state) open_ = nullptr;
};

/// Options of `fit`: its limits, incomplete windows, non-finite losses, and the state to resume from.
struct FitOptions {
  std::optional<std::int64_t> epochs = {};   ///< maximum number of epochs; 1 if there is no other limit
  std::optional<std::int64_t> updates = {};  ///< maximum number of updates
  std::optional<std::int64_t> samples = {};  ///< number of samples after which to stop, at the end of a window
  std::optional<std::chrono::duration<double>> time =
      {};                       ///< time of this call after which to stop, at the end of a window
  Tail tail = Tail::flush;      ///< what to do with an epoch's last, incomplete window
  OnNan on_nan = OnNan::stop;   ///< what to do with non-finite losses and gradients
  bool smoke = false;           ///< train one window and evaluate on one batch, to check that everything runs
  ResumeFrom resume = {};       ///< resume from the newest state in this directory, if there is one; see `ga::save`
  bool allow_changes = false;   ///< with `resume`: allow a different model, data or settings
  bool measure_memory = false;  ///< report the peak of tensor memory, by a MemoryMeter; not inside LibTorch's profiler
  std::string unit = {};        ///< name of the losses' items, such as "tokens", to report their number per second
  bool count_flops = false;     ///< report FLOP/s: counts the first micro-batch of each layout; see `FlopCounter`
  double peak_flops = 0;        ///< FLOP/s of a device, to report the MFU, and FLOP/s; see `measure_peak_flops`

  /// Returns true if there is a limit other than epochs. The number of epochs is then unlimited unless given.
  bool has_limit() const { return updates || samples || time; }
  bool counts_flops() const { return count_flops || peak_flops > 0; }
};

/// Throws if a limit or a peak is negative.
void check(const FitOptions& options);

/// The progress of a `fit`, which `TrainerBase::progress()` returns.
class FitProgress {
 public:
  FitOptions options = {};                   ///< of the running `fit`
  std::int64_t epoch = 0;                    ///< current epoch, counted from 0 over all calls of `fit`
  std::int64_t epochs = 0;                   ///< completed epochs of this `fit`
  std::int64_t batch = 0;                    ///< batches of this epoch that this rank has begun
  std::optional<std::int64_t> batches = {};  ///< batches per epoch; unknown in the first if the range has no size()
  std::int64_t updates = 0;                  ///< windows that made an update
  std::int64_t skipped = 0;                  ///< windows that did not
  std::int64_t samples = 0;                  ///< samples so far
  bool running = false;                      ///< inside `fit`
  bool stopped = false;                      ///< by Trainer::stop, a policy, or the limit in samples or time
  std::vector<Validation> validations = {};  ///< validations so far
  std::string resumed_from = {};             ///< the loaded state

  /// Returns true if a limit is reached or the training was stopped, also within an epoch.
  bool done() const;
  int signal() const { return signal_; }   ///< the signal that ends it early; 0 if none did
  double seconds() const;                  ///< time so far, with that of the runs that this one resumes
  double items() const { return items_; }  ///< of all losses so far
  double flops() const { return flops_; }  ///< FLOP of all micro-batches so far, with `count_flops` or a peak
  double peak_flops() const { return options.peak_flops * ranks_; }  ///< of all ranks' devices; 0 if not given
  /// Returns the fraction of the training that is done, in [0, 1]; nullopt while it is unknown.
  std::optional<double> fraction() const;

 protected:
  using Clock = std::chrono::steady_clock;

  double seconds_of_call() const;

  int signal_ = 0, ranks_ = 1;
  double items_ = 0, flops_ = 0;
  double flops_from_ = 0;                   // seconds of the runs before that did not count FLOP
  Clock::time_point start_ = Clock::now();  // less the time of the runs that this one resumes
  Clock::time_point begun_ = Clock::now();
};

/// The result of a `fit`. It prints as a summary:
///
///     std::cout << ga::Trainer(model, sgd, objective).fit(batches, {.epochs = 3});
///
/// Its lines begin with `Time:`, in seconds, `Samples/second:`, `Tokens/second:` by `.unit`, `FLOP/s:`, `GPU memory
/// occupied:`, `CPU memory occupied:`, `Peak tensor memory:`, `Peak resident memory:`, `Epochs:`, and, if they apply,
/// `Windows rejected:`, `Stopped early:`, `Last validation, at update` for each `Validate`, and `Note:`. 1 MB is 2^20
/// bytes.
struct FitReport {
  std::int64_t epochs = 0, updates = 0, skipped = 0, samples = 0;  ///< skipped: windows without an update
  double seconds = 0, samples_per_second = 0;
  std::string unit = {};                   ///< FitOptions::unit
  double items = 0;                        ///< of all losses, in this unit
  double flops = 0, flops_per_second = 0;  ///< of the runs that count them; 0 if this one does not
  double peak_flops = 0;                   ///< FLOP/s of all ranks' devices; 0 if not given
  std::string resumed_from = {};           ///< the loaded state; all numbers then include the runs before it
  std::string stopped = {};                ///< why it stopped early; empty if it did not
  int signal = 0;                   ///< the signal that ended it, such as SIGTERM; programs then exit with 128 + signal
  std::int64_t nan_batches = 0;     ///< batches left out by `OnNan::skip`
  std::string first_nan = {};       ///< the first of these
  std::int64_t rejected = 0;        ///< windows that a policy rejected, also counted in `skipped`; see `GuardNorm`
  std::string first_rejected = {};  ///< why, and for which batch the first of these
  std::map<std::string, std::int64_t> occupied_bytes = {};  ///< at the end, by device; a GPU's by all its processes
  std::map<std::string, std::int64_t> peak_bytes = {};      ///< by device, of tensors, with `measure_memory`
  std::int64_t peak_resident_bytes = 0;                     ///< see `peak_resident_memory`; 0 if unknown
  std::vector<Validation> validations = {};                 ///< in the order in which they were made
  std::vector<std::string> notes = {};                      ///< remarks, for example on a learning rate of 0
};

std::ostream& operator<<(std::ostream& stream, const FitReport& report);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/training/fit_progress.ipp>
#endif
