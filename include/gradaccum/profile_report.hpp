// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/memory_by_kind.hpp>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace gradaccum {

/// Time of a part of the work that somebody gave a name.
struct ProfiledPhase {
  std::string name = {};
  std::int64_t times = 0;  ///< that it was begun
  double seconds = 0;      ///< without phases inside of it
  double share = 0;        ///< of all the time; those of all phases are 1 together
};

/// One of LibTorch's operations, all its calls together.
struct ProfiledOperation {
  std::string name = {};
  std::int64_t calls = 0;
  double self_cpu_seconds = 0;       ///< without operations that it called
  double cpu_seconds = 0;            ///< with them
  double device_seconds = 0;         ///< of kernels that it has started itself
  std::int64_t allocated_bytes = 0;  ///< by itself, all added up
  std::int64_t kept_bytes = 0;       ///< of these and older ones what it has not freed again; may be negative
};

/// Memory at the end of a phase.
struct ProfiledMemory {
  std::string phase = {};
  MemoryByKind bytes = {};
};

/// Where time and memory went: what a `Profiler` gives, and `Profile`. Printed, it is three tables:
///
///     ga::Profiler profiler;
///     {
///       auto phase = profiler.phase("forward");
///       model->forward(x);
///     }
///     const ga::ProfileReport report = profiler.finish();
///     std::cout << report << report.phases.at(0).share << '\n';
struct ProfileReport {
  std::int64_t updates = 0;  ///< that were profiled; 0 where nobody counts them
  double seconds = 0;
  std::vector<ProfiledPhase> phases = {};          ///< as they came; what was in none counts for "other"
  std::vector<ProfiledOperation> operations = {};  ///< that with the most time of its own, here or on a device, first
  std::vector<ProfiledMemory> memory = {};         ///< of one update, by phase; see `Profile`
  std::int64_t peak_bytes = 0;                     ///< the most that there was within it

  /// The largest by `allocated_bytes`, the largest first.
  std::vector<ProfiledOperation> by_memory(std::size_t most) const;
};

std::ostream& operator<<(std::ostream& stream, const ProfileReport& report);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/profile_report.ipp>
#endif
