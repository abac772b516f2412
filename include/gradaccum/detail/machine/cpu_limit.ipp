// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/cpu_limit.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/machine/control_groups.hpp>
#include <gradaccum/detail/machine/system_file.hpp>

#include <charconv>
#include <cstdint>
#include <sstream>
#include <system_error>

namespace gradaccum::detail {

GRADACCUM_INLINE std::optional<std::int64_t> microseconds(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value <= 0) return std::nullopt;
  return value;
}

GRADACCUM_INLINE std::optional<double> granted_cpus(const std::string& quota, const std::string& period) {
  const auto granted = microseconds(quota), each = microseconds(period);
  if (!granted || !each) return std::nullopt;
  return static_cast<double>(*granted) / static_cast<double>(*each);
}

GRADACCUM_INLINE std::optional<double> cpus_granted_in(const std::filesystem::path& folder) {
  std::string quota, period;
  std::istringstream(text_of_system_file(folder / "cpu.max")) >> quota >> period;
  if (const auto cpus = granted_cpus(quota, period)) return cpus;
  std::istringstream(text_of_system_file(folder / "cpu.cfs_quota_us")) >> quota;
  std::istringstream(text_of_system_file(folder / "cpu.cfs_period_us")) >> period;
  return granted_cpus(quota, period);
}

GRADACCUM_INLINE std::optional<double> cpu_limit(const std::filesystem::path& groups,
                                                 const std::filesystem::path& mounted) {
  std::optional<double> least;
  for (auto& folder : control_groups(text_of_system_file(groups), "cpu")) {
    const auto cpus = cpus_granted_in(mounted / folder);
    if (cpus && (!least || *cpus < *least)) least = cpus;
  }
  return least;
}

}  // namespace gradaccum::detail
