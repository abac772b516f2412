// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace gradaccum::detail {

/// Bytes after `name:` or `name ` in a list of lines (/proc/meminfo, memory.stat), whose unit may be kB; none where it
/// is not there.
std::optional<std::int64_t> bytes_after(const std::string& name, const std::string& lines);

/// What this process may still take by its control groups, of version 1 or 2; none where they do not limit it.
std::optional<std::int64_t> memory_left_by_groups(const std::filesystem::path& groups = "/proc/self/cgroup",
                                                  const std::filesystem::path& mounted = "/sys/fs/cgroup");

/// Bytes that this process could still take: of a GPU what is free, the caching allocator's own included; of the CPU
/// the least of what the machine has left, its control groups allow and `ulimit -v` does. None where nobody tells.
std::optional<std::int64_t> available_memory(c10::Device device);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/available_memory.ipp>
#endif
