// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

namespace emulated_cuda {

/// The tensors in an argument, defined ones only: of a tensor, a list of them, a list of some.
void for_each_tensor(const c10::IValue& argument, c10::function_ref<void(const at::Tensor&)> apply);

bool is_written(const c10::Argument& argument);
bool is_copy(const c10::OperatorHandle& operation);
/// No kernel runs: a view, or what is known of a tensor without its values.
bool is_of_the_host_alone(const c10::OperatorHandle& operation);

/// Where an operation is executed. An error if its arguments lie on several devices, as a GPU's kernels say it.
c10::DeviceIndex device_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments);

/// Counts an operation as a GPU will do it: launches, copies, and whether the host has to wait.
void count(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments);

}  // namespace emulated_cuda
