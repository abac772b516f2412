// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// The folders that may limit a process by this controller (`cpu`, `memory`), below the one where control groups are
/// mounted, as /proc/self/cgroup lists its groups: each group with all above it.
std::vector<std::filesystem::path> control_groups(const std::string& groups, const std::string& controller);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/control_groups.ipp>
#endif
