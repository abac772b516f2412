// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <optional>

namespace emulated_cuda {

/// Makes this thread run a CPU kernel for a device while it lives: without autograd or the CPU's autocast, and without
/// reports of the CPU memory that it takes, because a device would not take it there.
class HostKernelScope {
 public:
  HostKernelScope();
  HostKernelScope(const HostKernelScope&) = delete;
  HostKernelScope& operator=(const HostKernelScope&) = delete;

 private:
  at::AutoDispatchBelowADInplaceOrView no_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
  std::optional<c10::DebugInfoGuard> reports_;
};

}  // namespace emulated_cuda
