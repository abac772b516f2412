// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/memory_meter.hpp>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

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
  std::int64_t allocated_bytes = 0;  ///< total allocated by itself
  std::int64_t kept_bytes = 0;       ///< allocated minus freed by itself; negative if it freed older memory
};

/// The memory at the end of a phase.
struct ProfiledMemory {
  std::string phase = {};
  MemoryByKind bytes = {};
};

/// The result of a `Profiler` or of `Profile`: time and memory. It prints as tables:
///
///     ga::Profiler profiler;
///     {
///       auto phase = profiler.phase("forward");
///       model->forward(x);
///     }
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

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/profile_report.ipp>
#endif
