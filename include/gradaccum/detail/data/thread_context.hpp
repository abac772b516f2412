// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/FunctionRef.h>

#include <memory>

namespace gradaccum::detail {

/// What LibTorch knows of the thread that makes this, for another that works for it: modes, such as that of gradients;
/// the meter that counts memory; the current device, and the streams of devices in use.
class ThreadContext {
 public:
  ThreadContext();

  /// Runs `work` so, on this thread. Its operations use this thread alone: a second team of OpenMP's would take the
  /// cores from the first, both spinning.
  void run(c10::function_ref<void()> work) const;

 private:
  struct Known;
  std::shared_ptr<const Known> known_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/thread_context.ipp>
#endif
