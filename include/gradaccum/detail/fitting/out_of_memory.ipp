// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/out_of_memory.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/autocast_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <new>
#include <string_view>

namespace gradaccum::detail {

/// Matches messages, too: the CPU's allocator, cuBLAS and cuDNN have no class for this error.
GRADACCUM_INLINE bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const c10::Error& known) {
    const std::string_view text(known.msg());
    return std::ranges::any_of(std::array{"DefaultCPUAllocator: ", "out of memory", "_ALLOC_FAILED"},
                               [&](auto* part) { return text.find(part) != std::string_view::npos; });
  } catch (const std::bad_alloc&) {
    return true;
  } catch (...) {
    return false;
  }
}

GRADACCUM_INLINE void release_kept_memory(c10::Device device) {
  at::autocast::clear_cache();
  if (device.is_cpu()) return;
  try {
    c10::getDeviceAllocator(device.type())->emptyCache();
  } catch (const c10::Error&) {  // a device without such an allocator
  }
}

}  // namespace gradaccum::detail
