// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <optional>

namespace emulated_cuda {

/// While it lives, this thread runs a kernel of the CPU for a device: a kernel only, without autograd or the CPU's
/// autocast, and memory that it takes from the CPU is not reported, as a device would not have taken it there.
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
