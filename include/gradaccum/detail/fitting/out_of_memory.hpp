// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>

#include <exception>

namespace gradaccum::detail {

/// A device ran out of memory, or the CPU's allocator did, or `new`.
bool is_out_of_memory(const std::exception_ptr& error);

/// Gives back what is only kept for the next use: casts of autocast, and blocks of a device's caching allocator.
void release_kept_memory(c10::Device device);

/// What `make` gives; where it runs out of memory, it is tried once more without what is only kept.
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
