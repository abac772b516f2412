// SPDX-License-Identifier: Apache-2.0

// Operations that differ between CUDA and the CPU.

#include "allocators.hpp"
#include "fallback.hpp"
#include "streams.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace emulated_cuda {
namespace {

using std::optional;

DeviceScope scope_of(optional<at::Device> device) {
  return DeviceScope(device && device->has_index() ? device->index() : current_device());
}

void check_not_pinned(optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(c10::SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout> /*layout*/,
                 optional<at::Device> device, optional<bool> pin_memory, optional<at::MemoryFormat> format) {
  check_not_pinned(pin_memory);
  const auto scope = scope_of(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, optional<at::ScalarType> dtype,
                         optional<at::Layout> /*layout*/, optional<at::Device> device, optional<bool> pin_memory) {
  check_not_pinned(pin_memory);
  const auto scope = scope_of(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

/// Does nothing: memory can be reused immediately, because everything runs in order.
void record_stream(at::Tensor& /*self*/, at::Stream /*stream*/) {}

/// Handles softmax from float16 to float32, which the CPU does in two steps.
void softmax(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  auto* const arguments = &torch::jit::peek(*stack, 0, operation.schema().arguments().size());
  auto &input = arguments[0], &half_to_float = arguments[2];
  if (half_to_float.toBool()) input = input.toTensor().to(at::kFloat);
  half_to_float = false;
  run_on_host(operation, stack);
}

void softmax_backward(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  auto* const arguments = &torch::jit::peek(*stack, 0, operation.schema().arguments().size());
  const auto gradient = arguments[0].toTensor(), result = arguments[4].toTensor();
  if (gradient.scalar_type() == arguments[3].toScalarType()) return run_on_host(operation, stack);
  arguments[3] = gradient.scalar_type();
  arguments[4] = at::empty_like(result, gradient.options());
  run_on_host(operation, stack);
  result.copy_(torch::jit::pop(*stack).toTensor());
  stack->emplace_back(result);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (auto* name : {"_softmax_backward_data.out", "_log_softmax_backward_data.out"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward>());
  for (auto* name : {"_softmax.out", "_log_softmax.out"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax>());
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("record_stream", &record_stream);
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace
}  // namespace emulated_cuda
