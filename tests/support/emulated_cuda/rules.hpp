// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

namespace emulated_cuda {

/// Calls `apply` for the defined tensors in an argument: a tensor, a list of them, or a list with optional ones.
void for_each_tensor(const c10::IValue& argument, c10::function_ref<void(const at::Tensor&)> apply);

bool is_written(const c10::Argument& argument);
bool is_copy(const c10::OperatorHandle& operation);
/// Returns whether an operation runs no kernel: a view, or a query that does not read values.
bool is_of_the_host_alone(const c10::OperatorHandle& operation);

/// Returns the device of an operation. Throws if its arguments are on several devices, with a GPU's message.
c10::DeviceIndex device_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments);

/// Counts an operation as on a GPU: launches, copies, and whether the host has to wait.
void count(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments);

}  // namespace emulated_cuda
