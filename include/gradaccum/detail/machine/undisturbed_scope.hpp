// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>

namespace gradaccum::detail {

/// While it lives, LibTorch works with so many threads.
class ThreadsScope {
 public:
  explicit ThreadsScope(int threads);
  ThreadsScope(const ThreadsScope&) = delete;
  ThreadsScope& operator=(const ThreadsScope&) = delete;
  ~ThreadsScope();
  static void* operator new(std::size_t) = delete;  // a scope: ends on its thread, before those around it

 private:
  int before_;
};

/// While it lives, attention is or is not by the flash algorithm.
class FlashScope {
 public:
  explicit FlashScope(bool flash);
  FlashScope(const FlashScope&) = delete;
  FlashScope& operator=(const FlashScope&) = delete;
  ~FlashScope();
  static void* operator new(std::size_t) = delete;

 private:
  bool before_;
};

/// While it lives, an operation is what it is called and no more: on one thread, in the dtype of its tensors, with
/// nothing recorded for backward.
class UndisturbedScope {
 public:
  UndisturbedScope() : without_autocast_(c10::autocast_dispatch_keyset), threads_(1) {}

 private:
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard without_autocast_;
  ThreadsScope threads_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/undisturbed_scope.ipp>
#endif
