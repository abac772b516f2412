// SPDX-License-Identifier: Apache-2.0
#include "fallback.hpp"

#include "generator.hpp"
#include "host_kernel_scope.hpp"
#include "host_views.hpp"
#include "rules.hpp"
#include "workspaces.hpp"

#include <ATen/core/List.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace emulated_cuda {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using ChangeTensor = c10::function_ref<at::Tensor(const at::Tensor&)>;

c10::List<at::Tensor> changed_list(const c10::List<at::Tensor>& list, ChangeTensor change) {
  c10::List<at::Tensor> result;
  for (const at::Tensor& tensor : list.vec()) result.push_back(change(tensor));
  return result;
}

c10::List<std::optional<at::Tensor>> changed_list(const c10::List<std::optional<at::Tensor>>& list,
                                                  ChangeTensor change) {
  c10::List<std::optional<at::Tensor>> result;
  for (const std::optional<at::Tensor>& tensor : list.vec())
    result.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
  return result;
}

IValue changed(const IValue& value, ChangeTensor change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) return changed_list(value.toTensorList(), change);
  if (value.isOptionalTensorList()) return changed_list(value.toOptionalTensorList(), change);
  return value;
}

bool is_generator(const c10::Argument& argument) {
  const auto& type = *argument.type();
  const auto* const optional = type.castRaw<c10::OptionalType>();
  return (optional ? *optional->getElementType() : type).kind() == c10::TypeKind::GeneratorType;
}

IValue numbers_of(const IValue& generator, c10::DeviceIndex device) {
  auto of_device = generator.isGenerator() ? generator.toGenerator() : DeviceGenerator::of(device);
  TORCH_CHECK(of_device.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              of_device.device().type(), "'");
  return of_device.get<DeviceGenerator>()->numbers();
}

IValue host_argument(const c10::Argument& argument, const IValue& value, HostViews& views, c10::DeviceIndex device) {
  if (is_generator(argument)) return numbers_of(value, device);
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isStorage()) return views.host(value.toStorage());
  return changed(value, [&](const at::Tensor& tensor) { return views.host(tensor); });
}

void run(const OperatorHandle& operation, Stack* stack, c10::DispatchKey key) {
  const auto& schema = operation.schema();
  const std::vector<IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()),
                                      stack->end());
  const auto device = device_of(operation, arguments);
  make_workspace(operation, device);
  HostViews views(device);
  torch::jit::drop(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i)
    stack->push_back(host_argument(schema.arguments()[i], arguments[i], views, device));
  {
    const HostKernelScope scope;
    operation.redispatchBoxed(c10::DispatchKeySet(key), stack);
  }
  views.write_back();
  for (auto result = stack->end() - static_cast<std::ptrdiff_t>(schema.returns().size()); result != stack->end();
       ++result)
    *result = changed(*result, [&](const at::Tensor& tensor) { return views.device(tensor); });
  count(operation, arguments);
}

bool on_one_device(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> first;
  bool same = true;
  for (auto& argument : arguments)
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (argument.isTensor() || tensor.is_sparse()) return;
      if (!first) first = tensor.device();
      same &= tensor.device() == *first;
    });
  return same && first && first->is_cuda();
}

}  // namespace

void run_on_host(const OperatorHandle& operation, Stack* stack) { run(operation, stack, c10::DispatchKey::CPU); }

void run_sparse_on_host(const OperatorHandle& operation, Stack* stack) {
  run(operation, stack, c10::DispatchKey::SparseCPU);
}

void run_list_on_host(const OperatorHandle& operation, Stack* stack) {
  const auto count = operation.schema().arguments().size();
  if (on_one_device(torch::jit::last(*stack, count))) return run_on_host(operation, stack);
  operation.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

}  // namespace emulated_cuda
