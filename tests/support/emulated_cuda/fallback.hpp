// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace emulated_cuda {

/// An operation on dense tensors of a device, done by the CPU's kernel in the device's memory.
void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

/// One of whose tensors is sparse.
void run_sparse_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

/// One on lists of tensors: a GPU does at once what lies on one device, and else one tensor after the other.
void run_list_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

}  // namespace emulated_cuda
