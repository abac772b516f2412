// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <filesystem>
#include <optional>
#include <string>

namespace gradaccum::detail {

/// How many CPUs a control group may use: `150000` and `100000`, microseconds of each so many, are 1.5. None where
/// there is no limit (`max`, `-1`), and for all that are no such numbers.
std::optional<double> granted_cpus(const std::string& quota, const std::string& period);

/// The least that this process is granted by any of its control groups, of version 1 or 2; none where nobody limits it.
std::optional<double> cpu_limit(const std::filesystem::path& groups = "/proc/self/cgroup",
                                const std::filesystem::path& mounted = "/sys/fs/cgroup");

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/cpu_limit.ipp>
#endif
