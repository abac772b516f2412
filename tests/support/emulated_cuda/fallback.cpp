// SPDX-License-Identifier: Apache-2.0
#include "fallback.hpp"

#include "generator.hpp"
#include "graphs.hpp"
#include "host_kernel_scope.hpp"
#include "host_views.hpp"
#include "rules.hpp"
#include "workspaces.hpp"

#include <ATen/core/List.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <cstring>
#include <optional>
#include <utility>
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

Stack host_arguments(const OperatorHandle& operation, c10::ArrayRef<IValue> arguments, HostViews& views,
                     c10::DeviceIndex device) {
  Stack all;
  for (std::size_t i = 0; i < arguments.size(); ++i)
    all.push_back(host_argument(operation.schema().arguments()[i], arguments[i], views, device));
  return all;
}

void run_in_scope(const HostKernel& kernel, Stack& stack) {
  const HostKernelScope scope;
  kernel(&stack);
}

/// An operation of a graph.
struct Recorded {
  OperatorHandle operation;
  HostKernel kernel;
  c10::DeviceIndex device;
  std::vector<IValue> arguments;
  std::vector<at::Tensor> results = {};

  void replay() const {
    HostViews views(device);
    auto stack = host_arguments(operation, arguments, views, device);
    run_in_scope(kernel, stack);
    auto known = results.begin();
    for (auto& value : stack)
      for_each_tensor(value, [&](const at::Tensor& tensor) { write(tensor, views.host(*known++)); });
  }

  /// Writes a result. Results that are arguments, or views of one, are already written.
  static void write(const at::Tensor& result, const at::Tensor& known) {
    const auto *const from = result.storage().data(), *const to = known.storage().data();
    if (from == to) return;
    TORCH_INTERNAL_ASSERT(result.storage().nbytes() == known.storage().nbytes(), "emulated CUDA: another shape");
    std::memcpy(const_cast<void*>(to), from, known.storage().nbytes());
  }
};

/// Saves the tensors that an operation may write to.
void save(Graph& graph, const OperatorHandle& operation, c10::ArrayRef<IValue> arguments, c10::DeviceIndex device) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = operation.schema().arguments()[i];
    TORCH_CHECK(!arguments[i].isGenerator() || arguments[i].toGenerator() == DeviceGenerator::of(device),
                "Attempt to increase offset for a CUDA generator not in capture mode.");
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.is_sparse(), "emulated CUDA: operations on sparse tensors cannot be captured");
      if (tensor.is_cuda() || is_written(argument)) graph.save(tensor);
    });
  }
}

/// Returns an argument for a graph: the device's or pinned address, or a copy of the host's numbers.
at::Tensor as_captured(Graph& graph, const at::Tensor& tensor, bool copied) {
  if (!tensor.defined() || (copied && tensor.is_cpu())) return tensor;
  if (tensor.is_cuda()) return with_storage(tensor, graph.fixed(tensor.storage()));
  auto numbers = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) numbers.unsafeGetTensorImpl()->set_wrapped_number(true);
  return numbers;
}

void record(Graph& graph, Recorded recorded, c10::ArrayRef<IValue> results) {
  for (auto& argument : recorded.arguments)
    argument = changed(argument, [&, copied = is_copy(recorded.operation)](const at::Tensor& tensor) {
      return as_captured(graph, tensor, copied);
    });
  for (auto& result : results)
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.is_sparse(), "emulated CUDA: operations on sparse tensors cannot be captured");
      if (tensor.is_cuda()) graph.save(tensor);
      recorded.results.push_back(tensor.is_cuda() ? with_storage(tensor, graph.fixed(tensor.storage())) : tensor);
    });
  graph.record([recorded = std::move(recorded)] { recorded.replay(); });
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

void run_by_redispatch(const OperatorHandle& operation, Stack* stack, c10::DispatchKey key) {
  run(operation, stack,
      [operation, keys = c10::DispatchKeySet(key)](Stack* host) { operation.redispatchBoxed(keys, host); });
}

}  // namespace

void run(const OperatorHandle& operation, Stack* stack, const HostKernel& kernel) {
  const auto& schema = operation.schema();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  const std::vector<IValue> arguments(first, stack->end());
  const auto device = device_of(operation, arguments);
  auto* const graph = is_of_the_host_alone(operation) ? nullptr : Graph::capturing(device);
  count(operation, arguments);
  if (graph) save(*graph, operation, arguments, device);
  make_workspace(operation, device);
  HostViews views(device);
  auto results = host_arguments(operation, arguments, views, device);
  run_in_scope(kernel, results);
  views.write_back();
  for (auto& result : results) result = changed(result, [&](const at::Tensor& tensor) { return views.device(tensor); });
  if (graph) record(*graph, {operation, kernel, device, arguments}, results);
  torch::jit::drop(*stack, arguments.size());
  stack->insert(stack->end(), results.begin(), results.end());
}

void run_on_host(const OperatorHandle& operation, Stack* stack) {
  run_by_redispatch(operation, stack, c10::DispatchKey::CPU);
}

void run_sparse_on_host(const OperatorHandle& operation, Stack* stack) {
  run_by_redispatch(operation, stack, c10::DispatchKey::SparseCPU);
}

void run_list_on_host(const OperatorHandle& operation, Stack* stack) {
  const auto count = operation.schema().arguments().size();
  if (on_one_device(torch::jit::last(*stack, count))) return run_on_host(operation, stack);
  operation.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

}  // namespace emulated_cuda
