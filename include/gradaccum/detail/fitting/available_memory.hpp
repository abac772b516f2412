// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace gradaccum::detail {

/// The bytes after `name:` or `name ` in lines such as those of /proc/meminfo or memory.stat, whose unit may be kB.
/// Returns nothing if the name is missing.
std::optional<std::int64_t> bytes_after(const std::string& name, const std::string& lines);

/// The bytes that this process's control groups (version 1 or 2) still allow; nothing if they set no limit.
std::optional<std::int64_t> memory_left_by_groups(const std::filesystem::path& groups = "/proc/self/cgroup",
                                                  const std::filesystem::path& mounted = "/sys/fs/cgroup");

/// The bytes that this process can still allocate; nothing if unknown. On a GPU, free memory and the allocator's free
/// blocks; on the CPU, the least of available memory and of what control groups and `ulimit -v` leave.
std::optional<std::int64_t> available_memory(c10::Device device);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/available_memory.ipp>
#endif
