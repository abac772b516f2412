// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace at {
struct RecordFunction;
}

namespace gradaccum {
struct ProfiledOperation;
struct ProfileReport;
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
