// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// What a file of /proc or /sys says, its first 64 KiB: such files tell no size. Empty where it cannot be read.
std::string text_of_system_file(const std::filesystem::path& path);

/// The folders that may limit a process by this controller (`cpu`, `memory`), below the one where control groups are
/// mounted, as /proc/self/cgroup lists its groups: each group with all above it.
std::vector<std::filesystem::path> control_groups(const std::string& groups, const std::string& controller);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/system_file.ipp>
#endif
