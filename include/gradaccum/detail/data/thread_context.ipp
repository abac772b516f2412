// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/thread_context.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <dlfcn.h>

#include <optional>
#include <vector>

namespace gradaccum::detail {

struct ThreadContext::Known {
  at::ThreadLocalState modes;
  std::optional<c10::Device> device;  // current device
  std::vector<c10::Stream> streams;   // current streams
};

/// Skips unused devices, which a query would initialise.
GRADACCUM_INLINE ThreadContext::ThreadContext() {
  auto known = std::make_shared<Known>();
  if (at::globalContext().hasCUDA()) {
    auto& cuda = at::detail::getCUDAHooks();
    const c10::impl::VirtualGuardImpl devices(at::kCUDA);
    for (c10::DeviceIndex index = 0; index < cuda.getNumGPUs(); ++index)
      if (cuda.hasPrimaryContext(index)) known->streams.push_back(devices.getStream({at::kCUDA, index}));
    if (!known->streams.empty()) known->device = devices.getDevice();
  }
  known_ = known;
}

/// Limits this thread's operations to one thread. `at::set_num_threads` would also apply to all threads started later.
GRADACCUM_INLINE void work_on_this_thread_alone() {
  at::get_num_threads();                  // the first call on a thread sets its number, so both calls come first:
  at::internal::lazy_init_num_threads();  // in LibTorch, and in operations compiled into this program
  if (auto* const set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
  if (auto* const set = reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"))) set(1);
}

/// Detaches profilers, which belong to the other thread and may end there while this one works.
GRADACCUM_INLINE void leave_profilers() {
  at::clearThreadLocalCallbacks();
  if (!MemoryLedger::possible()) c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
}

GRADACCUM_INLINE void ThreadContext::run(c10::function_ref<void()> work) const {
  work_on_this_thread_alone();
  const at::ThreadLocalStateGuard modes(known_->modes);
  leave_profilers();
  if (known_->device) {
    const c10::impl::VirtualGuardImpl devices(at::kCUDA);
    for (auto& stream : known_->streams) devices.exchangeStream(stream);
    devices.setDevice(*known_->device);
  }
  work();
}

}  // namespace gradaccum::detail
