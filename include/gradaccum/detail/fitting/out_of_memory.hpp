// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>

#include <exception>

namespace gradaccum::detail {

/// Returns whether a device, the CPU's allocator or `new` ran out of memory.
bool is_out_of_memory(const std::exception_ptr& error);

/// Frees caches: autocast's casts, and free blocks of a device's caching allocator.
void release_kept_memory(c10::Device device);

/// Returns the result of `make`. If it runs out of memory, frees caches and calls it once more.
template <class Make>
auto with_memory(c10::Device device, Make&& make) {
  try {
    return make();
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) throw;
  }
  release_kept_memory(device);
  return make();
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/out_of_memory.ipp>
#endif
