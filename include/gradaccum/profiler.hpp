// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: watching

#include <gradaccum/memory_meter.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace at {
struct RecordFunction;
}

namespace gradaccum {

/// The time of a named part of the work.
struct ProfiledPhase {
  std::string name = {};
  std::int64_t times = 0;  ///< number of times it was entered
  double seconds = 0;      ///< excluding phases inside it
  double share = 0;        ///< fraction of the total time; the shares of all phases sum to 1
};

/// One of LibTorch's operations, with all its calls.
struct ProfiledOperation {
  std::string name = {};
  std::int64_t calls = 0;
  double self_cpu_seconds = 0;       ///< excluding operations that it called
  double cpu_seconds = 0;            ///< including operations that it called
  double device_seconds = 0;         ///< time of kernels that it launched itself
  std::int64_t allocated_bytes = 0;  ///< total that it allocated itself
  std::int64_t kept_bytes = 0;       ///< allocated minus freed; negative if it freed older memory
};

/// The memory at the end of a phase.
struct ProfiledMemory {
  std::string phase = {};
  MemoryByKind bytes = {};
};

/// The result of a `Profiler` or of `Profile`: time and memory. It prints as tables:
///
///     ga::Profiler profiler;
///     profiler.run("forward", [&] { return model->forward(x); });
///     const ga::ProfileReport report = profiler.finish();
///     std::cout << report << report.phases.at(0).share << '\n';
struct ProfileReport {
  std::int64_t updates = 0;  ///< number of profiled updates; 0 if not counted
  double seconds = 0;
  std::vector<ProfiledPhase> phases = {};  ///< in order of first use; time outside of all phases counts for "other"
  std::vector<ProfiledOperation> operations = {};  ///< by self time on the CPU and on devices, descending
  std::vector<ProfiledMemory> memory = {};         ///< memory of one update, by phase; see `Profile`
  std::int64_t peak_bytes = 0;                     ///< peak memory of one update

  /// Returns the operations with the largest `allocated_bytes`, descending; at most `most`.
  std::vector<ProfiledOperation> by_memory(std::size_t most) const;
};

std::ostream& operator<<(std::ostream& stream, const ProfileReport& report);

/// The destination of a `Profiler`'s files.
struct ProfilerOptions {
  std::filesystem::path directory = {};  ///< for `trace.json` and `profile.txt`; created if needed; empty: no files
};

/// Profiles the time and memory of a scope with LibTorch's profiler, by operation and by named phase.
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
/// `profile.txt` is the printed report. `finish` writes both, each atomically; after an exception there is no file. A
/// profile covers this thread and its backward passes, on the CPU and on CUDA devices, but no other threads. Only one
/// can run at a time in a process. LibTorch's profiler prints messages, some of which only KINETO_LOG_LEVEL=99 in the
/// environment suppresses, and may warn of an older "memory block of unknown size".
///
/// @note Costs some microseconds per operation, and at least as much again in `finish`, which synchronizes: use it for
/// a few updates, not for an epoch. Throws if a `MemoryMeter` or another profiler is active on this thread.
class Profiler {
 public:
  Profiler() : Profiler(ProfilerOptions()) {}
  explicit Profiler(ProfilerOptions options);
  ~Profiler();                                      ///< ends the profile, without files unless finished
  static void* operator new(std::size_t) = delete;  // must be a scope: ends on its thread

  /// A phase, which lasts to the end of its scope. Its time does not include phases inside it.
  class Phase {
   public:
    Phase(Profiler& profiler, const std::string& name);
    ~Phase();

   private:
    Profiler& profiler_;
    std::unique_ptr<at::RecordFunction> mark_;  // in the trace
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

}  // namespace gradaccum

namespace gradaccum::detail {

/// An event that LibTorch's profiler recorded.
struct ProfiledEvent {
  enum class Kind { operation, kernel, memory };

  Kind kind = Kind::operation;
  std::string name = {};
  std::int64_t begin = 0, end = 0;  ///< nanoseconds
  std::uint64_t thread = 0;
  std::uint64_t correlation = 0;  ///< equal for an operation and the kernels that it launched
  std::int64_t bytes = 0;         ///< allocated, or freed if negative

  std::int64_t duration() const { return end - begin; }
};

/// Returns the operations by self time on the CPU and on devices, descending, and then by name. Their own time and
/// memory exclude operations that they called, whose events lie within theirs on the same thread.
std::vector<ProfiledOperation> operations_of(const std::vector<ProfiledEvent>& events);

/// Throws if LibTorch's profiler cannot start on this thread. The error names `who`.
void check_can_profile(const char* who);

/// Returns a mark whose name a trace shows for its lifetime, if a profiler runs.
std::unique_ptr<at::RecordFunction> trace_mark(const std::string& name);

/// Writes the printed report to `directory`, replacing an older one.
void write_profile(const std::filesystem::path& directory, const ProfileReport& report);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/profiler.ipp>
#endif
