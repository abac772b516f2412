// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

namespace emulated_cuda {

/// Takes an operation's arguments from a stack, on the host, and pushes the results.
using HostKernel = std::function<void(torch::jit::Stack*)>;

/// Runs an operation's kernel in the device's memory, or records it if this thread's stream there is captured.
void run(const c10::OperatorHandle& operation, torch::jit::Stack* stack, const HostKernel& kernel);

/// Runs an operation on dense tensors of a device by the CPU's kernel in the device's memory.
void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

/// Runs an operation with a sparse tensor.
void run_sparse_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

/// Runs an operation on lists of tensors: a GPU uses one kernel if all are on one device, else one per tensor.
void run_list_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

}  // namespace emulated_cuda
