// SPDX-License-Identifier: Apache-2.0
#pragma once

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

/// The treatment of a window that an epoch leaves shorter than the others: `flush`, `drop` or `carry`.
enum class Tail {
  flush,  ///< it is stepped, with its own mean
  drop,   ///< it is forgotten
  carry,  ///< the next epoch, or the next `fit`, goes on with it
};

/// The treatment of a micro-batch whose loss is NaN or infinite, and of a window whose gradients are: `stop`, `skip` or
/// `ignore`. With a loss scale, gradients are its to judge: it skips the window, and becomes smaller.
enum class OnNan {
  stop,    ///< an error that says which one, before the parameters move; on a device, synchronizes once a window
  skip,    ///< a micro-batch is left out, its window is the mean of the others, and a window is left out whole; on a
           ///< device, synchronizes at every micro-batch, and once a window
  ignore,  ///< the gradients are stepped with; nothing synchronizes
};

/// The directory whose newest state a `fit` goes on from: a path, or what a path is made from.
///
/// It brings along what reads states, so that a program that gives none does not compile that.
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

/// When a `fit` ends, what it does about short windows and losses that are not finite, and what it goes on from.
struct FitOptions {
  std::optional<std::int64_t> epochs = {};   ///< at most so many passes over the batches; 1 if there is no other limit
  std::optional<std::int64_t> updates = {};  ///< stop when the parameters have moved so often
  std::optional<std::int64_t> samples = {};  ///< stop with the window after which so many have been taken
  std::optional<std::chrono::duration<double>> time = {};  ///< the same, after so long in this call
  Tail tail = Tail::flush;                                 ///< what becomes of a window that an epoch leaves shorter
  OnNan on_nan = OnNan::stop;                              ///< what becomes of losses and gradients like NaN
  bool smoke = false;           ///< one window of everything, to see that it runs; `evaluate` takes one batch meanwhile
  ResumeFrom resume = {};       ///< go on from the newest state in this directory, if there is one; see `ga::save`
  bool allow_changes = false;   ///< with `resume`: go on though the model, the data or settings are others
  bool measure_memory = false;  ///< report the peak of tensor memory, by a MemoryMeter; not inside LibTorch's profiler

  /// Something other than epochs may end it: without a number of epochs it goes on until then.
  bool has_limit() const { return updates || samples || time; }
};

/// Throws where a number must not be negative, and is.
void check(const FitOptions& options);

/// The progress of a `fit`.
struct FitStatus {
  using Clock = std::chrono::steady_clock;

  FitOptions options = {};
  std::int64_t epoch = 0;                    ///< that runs; counted from 0, on from the last `fit`
  std::int64_t epochs = 0;                   ///< that are over, of this `fit`
  std::int64_t batch = 0;                    ///< taken in this epoch
  std::optional<std::int64_t> batches = {};  ///< in an epoch; none in the first, if the range does not tell
  std::int64_t updates = 0, skipped = 0;     ///< windows that moved the parameters, and that did not
  std::int64_t samples = 0;                  ///< taken
  std::int64_t nan_batches = 0;              ///< left out for a loss or gradients that are not finite
  std::string first_nan = {};                ///< which was the first
  bool running = false;                      ///< `fit` is at work
  bool stopped = false;                      ///< by `Trainer::stop`
  std::string stop_reason = {};              ///< why, where somebody said so
  int signal = 0;                            ///< which one ended it early
  bool together = false;                     ///< with other processes: what ends it waits until all know of it
  bool wants_stop = false;
  bool wants_save = false, saves = false;  ///< it is time for a state: on this process, and on all
  int wants_signal = 0;
  std::vector<Validation> validations = {};  ///< so far
  std::string resumed_from = {};             ///< the state that it went on from
  bool trained = false;                      ///< a window of this epoch moved, or would have but for an overflow
  Clock::time_point start = Clock::now();    ///< moved back by what the runs took that it goes on from
  Clock::time_point begun = Clock::now();    ///< this call of `fit`
  std::int64_t windows = 0;                  ///< since then
  std::int64_t at_rate_0 = 0;                ///< updates since then whose learning rates were all 0

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start).count(); }
  double seconds_of_call() const { return std::chrono::duration<double>(Clock::now() - begun).count(); }
  /// All that was asked for is done; in the middle of an epoch, too.
  bool done() const;
  /// With other processes, when all know of it, unless each decides alike.
  void stop(std::string why = {}, bool alike = false) {
    (together && !alike ? wants_stop : stopped) = true;
    if (stop_reason.empty()) stop_reason = std::move(why);
  }
  /// Stops it where `samples` or `time` says so.
  void stop_at_limits();
  void interrupt(int by) { (together ? wants_signal : signal) = by; }
  void count_window(bool moved, bool overflowed) {
    updates += moved;
    skipped += !moved;
    ++windows;
    trained = trained || moved || overflowed;
  }
  void end_epoch();
  /// All but the options, and how it ended.
  void state(Archive& archive);
  /// How much of it is done, in [0, 1]; none while nobody can tell.
  std::optional<double> fraction() const;
};

/// The result of a `fit`. It prints as a summary:
///
///     std::cout << ga::Trainer(model, sgd, objective).fit(batches, {.epochs = 3});
///
/// Its lines begin with `Time:`, in seconds, `Samples/second:`, `GPU memory occupied:`, `CPU memory occupied:`,
/// `Peak tensor memory:`, `Peak resident memory:`, `Epochs:`, and, where it was so, `Stopped early:`,
/// `Last validation, at update`, of each `Validate`, and `Note:`. 1 MB is 2^20 bytes.
struct FitReport {
  std::int64_t epochs = 0, updates = 0, skipped = 0, samples = 0;  ///< skipped: windows that moved nothing
  double seconds = 0, samples_per_second = 0;
  std::string resumed_from = {};  ///< the state that it went on from; then all numbers are those of the whole `fit`
  std::string stopped = {};       ///< why it ended before it had gone through its epochs or updates; empty where it had
  int signal = 0;                 ///< SIGTERM, say, if one ended it: a program then exits with 128 + signal
  std::int64_t nan_batches = 0;   ///< left out: see `OnNan::skip`
  std::string first_nan = {};     ///< which was the first of them
  std::map<std::string, std::int64_t> occupied_bytes = {};  ///< at the end, by device: a GPU's by all processes
  std::map<std::string, std::int64_t> peak_bytes = {};      ///< of this `fit`'s tensors, where measured
  std::int64_t peak_resident_bytes = 0;                     ///< see `peak_resident_memory`; 0 where nobody tells
  std::vector<Validation> validations = {};                 ///< in their order
  std::vector<std::string> notes = {};  ///< sentences on what the numbers do not show, such as a learning rate of 0
};

std::ostream& operator<<(std::ostream& stream, const FitReport& report);

namespace detail {

/// All but the memory.
FitReport report_of(const FitStatus& status);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/training_state.ipp>
#endif
