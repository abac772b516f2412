// SPDX-License-Identifier: Apache-2.0
#include "host_kernel_scope.hpp"

#include <c10/core/Allocator.h>

#include <memory>

namespace emulated_cuda {
namespace {

/// Passes on reports about devices only.
class ReportsOfDevices final : public c10::MemoryReportingInfoBase {
 public:
  explicit ReportsOfDevices(c10::MemoryReportingInfoBase& outer) : outer_(outer) {}
  void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override {
    if (device.is_cuda()) outer_.reportMemoryUsage(block, bytes, allocated, reserved, device);
  }
  bool memoryProfilingEnabled() const override { return outer_.memoryProfilingEnabled(); }

 private:
  c10::MemoryReportingInfoBase& outer_;
};

}  // namespace

HostKernelScope::HostKernelScope() : no_autocast_(c10::autocast_dispatch_keyset) {
  const auto kind = c10::DebugInfoKind::PROFILER_STATE;
  auto* const outer = dynamic_cast<c10::MemoryReportingInfoBase*>(c10::ThreadLocalDebugInfo::get(kind));
  if (outer) reports_.emplace(kind, std::make_shared<ReportsOfDevices>(*outer));
}

}  // namespace emulated_cuda
