// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Reads the first 64 KiB of a file of /proc or /sys, which do not report a size. Empty if it cannot be read.
std::string text_of_system_file(const std::filesystem::path& path);

/// Returns the folders that may limit a process by this controller (`cpu`, `memory`), relative to the mount of control
/// groups. `groups` is the text of /proc/self/cgroup; each group comes with all groups above it.
std::vector<std::filesystem::path> control_groups(const std::string& groups, const std::string& controller);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/memory/system_file.ipp>
#endif
