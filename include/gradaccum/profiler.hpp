// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/kineto_session.hpp>
#include <gradaccum/profile_report.hpp>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

namespace gradaccum {

/// The destination of a `Profiler`'s files.
struct ProfilerOptions {
  std::filesystem::path directory = {};  ///< for `trace.json` and `profile.txt`; created if needed; empty: no files
};

/// Profiles the time and memory of a scope with LibTorch's own profiler, by operation and by named phase.
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
/// Perfetto (ui.perfetto.dev) and chrome://tracing open `trace.json`, which shows every operation within its phase;
/// `profile.txt` is the printed report. `finish` writes both, each atomically; a scope that is left by an exception
/// leaves no file. A profile covers this thread and its backward passes, on the CPU and on CUDA devices, but no other
/// threads. Only one can run at a time in a process.
///
/// LibTorch may warn of a "memory block of unknown size" if a block is older than the scope. Its profiler prints
/// messages, some of which only KINETO_LOG_LEVEL=99 in the environment suppresses.
///
/// @note Costs some microseconds per operation, and at least as much again in `finish`, which waits for the device: use
/// it for a few updates, not for an epoch. Throws if a `MemoryMeter` counts or another profiler runs on this thread.
class Profiler {
 public:
  Profiler();
  explicit Profiler(ProfilerOptions options);
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;
  ~Profiler();                                      ///< ends the profile, without files unless finished
  static void* operator new(std::size_t) = delete;  // must be a scope: ends on its thread

  /// A phase, which lasts to the end of its scope. Its time does not include phases inside it.
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
  /// Starts a phase. `name` must have no quotes, backslashes or control characters.
  [[nodiscard]] Phase phase(const std::string& name) { return Phase(*this, name); }
  /// Runs `work()` as a phase, and returns its result.
  template <class Work>
  decltype(auto) run(const std::string& name, Work&& work) {
    const Phase phase(*this, name);
    return std::forward<Work>(work)();
  }

  /// Ends the profile after all its phases, and writes the files. Adds times and operations to `report`.
  ProfileReport finish(ProfileReport report = {});

 private:
  struct Parts;

  Parts& running() const;

  std::unique_ptr<Parts> parts_;
};

namespace detail {

/// Writes the printed report to `directory`, replacing an older one.
void write_profile(const std::filesystem::path& directory, const ProfileReport& report);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/profiler.ipp>
#endif
