// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

namespace emulated_cuda {

/// Takes an operation's arguments from a stack, on the host, and leaves the results.
using HostKernel = std::function<void(torch::jit::Stack*)>;

/// An operation, done by a kernel in the device's memory; or recorded, if this thread's stream there is captured.
void run(const c10::OperatorHandle& operation, torch::jit::Stack* stack, const HostKernel& kernel);

/// An operation on dense tensors of a device, done by the CPU's kernel in the device's memory.
void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

/// One of whose tensors is sparse.
void run_sparse_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

/// One on lists of tensors: a GPU does at once what lies on one device, and else one tensor after the other.
void run_list_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

}  // namespace emulated_cuda
