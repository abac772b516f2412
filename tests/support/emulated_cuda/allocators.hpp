// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace emulated_cuda {

/// The allocator of all devices; it uses the current one.
c10::Allocator& device_allocator();

/// Allocates on one device for a storage through which a CPU kernel accesses the device's memory; its pointers are
/// valid on the host.
c10::Allocator& host_view_allocator(c10::DeviceIndex device);

/// Converts a result of `host_view_allocator` to the pointer in the device's tensors.
c10::DataPtr as_device_pointer(c10::DataPtr host_view);

/// Allocates pinned memory of the host, from which a device can copy asynchronously.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

}  // namespace emulated_cuda
