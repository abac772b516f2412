// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/FunctionRef.h>

#include <memory>

namespace gradaccum::detail {

/// The LibTorch state of the constructing thread, for a thread that works for it: modes such as grad mode, the memory
/// meter, the current device, and the streams of devices in use.
class ThreadContext {
 public:
  ThreadContext();

  /// Runs `work` in that state on this thread. Its operations use no further threads: a second OpenMP team would
  /// compete with the first for cores, both spinning.
  void run(c10::function_ref<void()> work) const;

 private:
  struct Known;
  std::shared_ptr<const Known> known_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/thread_context.ipp>
#endif
