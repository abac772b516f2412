// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/trace_mark.hpp>
#include <gradaccum/profile_report.hpp>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

namespace gradaccum {

/// Where a `Profiler` leaves its files.
struct ProfilerOptions {
  std::filesystem::path directory = {};  ///< of `trace.json` and `profile.txt`; made where it is not there; or none
};

/// Where the time of a scope goes, and its memory, by LibTorch's own profiler: by operation, and by phases with names.
///
///     ga::Profiler profiler({.directory = "profiles/by_hand"});
///     for (auto& batch : batches) {
///       auto loss = profiler.run("forward", [&] { return model->forward(batch.data).square().mean(); });
///       profiler.run("backward", [&] { loss.backward(); });
///       auto phase = profiler.phase("step");
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     std::cout << profiler.finish();
///
/// Perfetto (ui.perfetto.dev) and chrome://tracing open `trace.json`, which shows every operation with the phase that
/// it is in; `profile.txt` is the report as it is printed. Both are written by `finish`, each in one piece; a scope
/// that is left by an exception leaves no file. A profile is of this thread and of its backward passes, on the CPU and
/// on CUDA devices; what other threads do is not seen. One at a time in a process.
///
/// LibTorch itself may print a warning of a "memory block of unknown size", which is older than the scope. Its profiler
/// prints lines about itself; what can be turned off from inside is. KINETO_LOG_LEVEL=99 in the environment ends the
/// rest.
///
/// @note Costs some microseconds an operation, and as much again and more when it is finished: for some updates, not
/// for an epoch. Then it waits for the device. Cannot run where a `MemoryMeter` counts, nor inside of another profiler:
/// both are errors.
class Profiler {
 public:
  Profiler();
  explicit Profiler(ProfilerOptions options);
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;
  ~Profiler();                                      ///< ends it; without files, if it was not finished
  static void* operator new(std::size_t) = delete;  // a scope: ends on its thread

  /// A phase, from when it is made to the end of its scope. One inside of another counts for itself alone.
  class Phase {
   public:
    Phase(Profiler& profiler, const std::string& name);
    Phase(const Phase&) = delete;
    Phase& operator=(const Phase&) = delete;
    ~Phase();

   private:
    Profiler& profiler_;
    detail::TraceMark mark_;
  };
  /// `name`: without quotes, backslashes and control characters.
  [[nodiscard]] Phase phase(const std::string& name) { return Phase(*this, name); }
  /// `work()` as a phase, and what it gives.
  template <class Work>
  decltype(auto) run(const std::string& name, Work&& work) {
    const Phase phase(*this, name);
    return std::forward<Work>(work)();
  }

  /// Ends it, when all phases have ended, and writes the files. `report`: what is known already.
  ProfileReport finish(ProfileReport report = {});

 private:
  struct Parts;

  Parts& running() const;

  std::unique_ptr<Parts> parts_;
};

namespace detail {

/// The report as it is printed, in place of what `directory` has.
void write_profile(const std::filesystem::path& directory, const ProfileReport& report);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/profiler.ipp>
#endif
