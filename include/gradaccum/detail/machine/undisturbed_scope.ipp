// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/undisturbed_scope.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/Context.h>
#include <ATen/Parallel.h>

namespace gradaccum::detail {

/// Asks first: to set what is set already costs MKL and OpenMP their own idea of it.
GRADACCUM_INLINE void change_threads(int threads) {
  if (at::get_num_threads() != threads) at::set_num_threads(threads);
}

GRADACCUM_INLINE ThreadsScope::ThreadsScope(int threads) : before_(at::get_num_threads()) { change_threads(threads); }
GRADACCUM_INLINE ThreadsScope::~ThreadsScope() { change_threads(before_); }

GRADACCUM_INLINE FlashScope::FlashScope(bool flash) : before_(at::globalContext().userEnabledFlashSDP()) {
  at::globalContext().setSDPUseFlash(flash);
}

GRADACCUM_INLINE FlashScope::~FlashScope() { at::globalContext().setSDPUseFlash(before_); }

}  // namespace gradaccum::detail
