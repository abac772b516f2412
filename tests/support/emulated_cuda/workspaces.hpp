// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>

namespace emulated_cuda {

/// Call this before each operation on a device: allocates this thread's workspace there at its first matrix product, if
/// workspaces are enabled.
void make_workspace(const c10::OperatorHandle& operation, c10::DeviceIndex device);

}  // namespace emulated_cuda
