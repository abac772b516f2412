// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/occupied_memory.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <fstream>

namespace gradaccum::detail {

GRADACCUM_INLINE std::optional<std::int64_t> occupied_memory(c10::Device device) try {
  if (!device.is_cpu()) {
    const auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    return static_cast<std::int64_t>(total - free);
  }
  std::int64_t virtual_pages = 0, resident_pages = 0;
  if (!(std::ifstream("/proc/self/statm") >> virtual_pages >> resident_pages)) return std::nullopt;
  return resident_pages * sysconf(_SC_PAGESIZE);
} catch (const c10::Error&) {  // LibTorch's allocators support this only for some devices
  return std::nullopt;
}

GRADACCUM_INLINE bool is_time_to_ask(std::optional<std::chrono::steady_clock::time_point> last) {
  return !last || std::chrono::steady_clock::now() - *last >= std::chrono::milliseconds(500);
}

}  // namespace gradaccum::detail
