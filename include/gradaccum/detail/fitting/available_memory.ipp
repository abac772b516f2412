// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/available_memory.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/system_file.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <sstream>

namespace gradaccum::detail {

GRADACCUM_INLINE std::optional<std::int64_t> bytes_after(const std::string& name, const std::string& lines) {
  std::istringstream all(lines);
  for (std::string line; std::getline(all, line);) {
    if (!line.starts_with(name) || line.size() == name.size()) continue;
    if (const char next = line[name.size()]; next != ':' && next != ' ') continue;
    std::istringstream rest(line.substr(name.size() + 1));
    std::int64_t number = 0;
    std::string unit;
    if (!(rest >> number) || number < 0 || number > std::int64_t{1} << 50) return std::nullopt;
    return rest >> unit && unit == "kB" ? number * 1024 : number;
  }
  return std::nullopt;
}

GRADACCUM_INLINE std::optional<std::int64_t> number_in(const std::filesystem::path& file) {
  return bytes_after("", " " + text_of_system_file(file));
}

/// The bytes left in one control group. Inactive file pages count as free, since they are reclaimed on demand.
GRADACCUM_INLINE std::optional<std::int64_t> memory_left_in(const std::filesystem::path& folder) {
  const auto statistics = text_of_system_file(folder / "memory.stat");
  for (const auto& [limit, usage, inactive] :
       {std::array{"memory.max", "memory.current", "inactive_file"},
        std::array{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}})
    if (const auto most = number_in(folder / limit))
      return *most - number_in(folder / usage).value_or(0) + bytes_after(inactive, statistics).value_or(0);
  return std::nullopt;
}

GRADACCUM_INLINE std::optional<std::int64_t> least(std::initializer_list<std::optional<std::int64_t>> numbers) {
  std::optional<std::int64_t> result;
  for (auto& number : numbers)
    if (number && (!result || *number < *result)) result = number;
  return result;
}

GRADACCUM_INLINE std::optional<std::int64_t> memory_left_by_groups(const std::filesystem::path& groups,
                                                                   const std::filesystem::path& mounted) {
  std::optional<std::int64_t> left;
  for (auto& folder : control_groups(text_of_system_file(groups), "memory"))
    left = least({left, memory_left_in(mounted / folder)});
  return left;
}

/// The address space left by `ulimit -v`.
GRADACCUM_INLINE std::optional<std::int64_t> addresses_left() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  const auto used = bytes_after("VmSize", text_of_system_file("/proc/self/status"));
  return static_cast<std::int64_t>(limit.rlim_cur) - used.value_or(0);
}

GRADACCUM_INLINE std::optional<std::int64_t> available_memory(c10::Device device) try {
  if (!device.is_cpu()) {
    static_cast<void>(at::empty({0}, device));  // the allocator's statistics throw before its first use
    auto* const allocator = c10::getDeviceAllocator(device.type());
    const auto free = static_cast<std::int64_t>(allocator->getMemoryInfo(device.index()).first);
    const auto statistics = allocator->getDeviceStats(device.index());
    const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return free + statistics.reserved_bytes[all].current - statistics.allocated_bytes[all].current;
  }
  const auto left = least(
      {bytes_after("MemAvailable", text_of_system_file("/proc/meminfo")), memory_left_by_groups(), addresses_left()});
  return left ? std::optional(std::max<std::int64_t>(*left, 0)) : std::nullopt;
} catch (const c10::Error&) {  // not all of LibTorch's allocators report memory
  return std::nullopt;
}

}  // namespace gradaccum::detail
