// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace emulated_cuda {

/// The allocator of all devices: allocates on the current one.
c10::Allocator& device_allocator();

/// Allocates on one device, for a storage through which a CPU's kernel sees a storage of the device: the pointer is
/// one that the kernel can use.
c10::Allocator& host_view_allocator(c10::DeviceIndex device);

/// What `host_view_allocator` gave, as the device's tensors know it.
c10::DataPtr as_device_pointer(c10::DataPtr host_view);

/// Memory of the host from which a device could copy by itself.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

}  // namespace emulated_cuda
