// SPDX-License-Identifier: Apache-2.0
#include "rules.hpp"

#include "allocators.hpp"
#include "counts.hpp"
#include "streams.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace emulated_cuda {
namespace {

using c10::ArrayRef;
using c10::IValue;
using c10::OperatorHandle;

std::string_view name_of(const OperatorHandle& operation) {
  const std::string_view name = operation.schema().name();
  return name.substr(name.rfind(':') + 1);
}

template <class Names>
bool is_one_of(std::string_view name, const Names& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool takes_indices(const OperatorHandle& operation) {
  constexpr std::array<std::string_view, 6> names = {"index",         "index_put",        "index_put_",
                                                     "_unsafe_index", "_index_put_impl_", "_unsafe_index_put"};
  return is_one_of(name_of(operation), names);
}

/// Returns whether a GPU's kernels read this argument on the host.
bool may_lie_on_the_host(const OperatorHandle& operation, std::string_view argument) {
  if (argument == "indices") return takes_indices(operation);
  constexpr std::array<std::string_view, 4> names = {"scalars", "lengths", "input_lengths", "target_lengths"};
  return is_one_of(argument, names);
}

std::optional<c10::Device> device_argument(ArrayRef<IValue> arguments) {
  for (auto& argument : arguments)
    if (argument.isDevice() && argument.toDevice().is_cuda()) return argument.toDevice();
  return std::nullopt;
}

void check_same_device(const OperatorHandle& operation, const c10::Argument& argument, const at::Tensor& tensor,
                       c10::Device device) {
  if (tensor.device() == device) return;
  const bool is_number = tensor.is_cpu() && tensor.dim() == 0 && !is_written(argument);
  if (is_number || (tensor.is_cpu() && may_lie_on_the_host(operation, argument.name()))) return;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
              tensor.device(), "! (when checking argument for argument ", argument.name(), " in method wrapper_CUDA_",
              name_of(operation), ")");
}

std::optional<c10::Device> first_device(ArrayRef<IValue> arguments) {
  std::optional<c10::Device> first;
  for (auto& argument : arguments)
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!first && tensor.is_cuda()) first = tensor.device();
    });
  return first;
}

/// Returns whether the host must know the size or value of the result.
bool result_is_awaited(const OperatorHandle& operation, ArrayRef<IValue> arguments) {
  if (takes_indices(operation)) {
    bool masks = false;
    for_each_tensor(arguments[1], [&](const at::Tensor& index) {
      masks |= index.is_cuda() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
    });
    return masks;
  }
  if (name_of(operation) == "_coalesce") return true;
  if (name_of(operation) == "repeat_interleave") return arguments.back().isNone();  // its output_size
  return operation.hasTag(at::Tag::dynamic_output_shape) || operation.hasTag(at::Tag::data_dependent_output);
}

/// Counts a copy. PyTorch waits after a blocking copy, and CUDA if the host's memory is not pinned.
void count_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.is_cuda() && to.is_cuda()) return count_launch();
  const auto& of_host = to.is_cuda() ? from : to;
  const bool pinned = of_host.has_storage() && is_pinned(of_host.const_data_ptr());
  if (!non_blocking || !pinned) wait();
  if (!is_capturing()) ++(to.is_cuda() ? counts().copies_to_device : counts().copies_to_host);
}

void count_copy(const OperatorHandle& operation, ArrayRef<IValue> arguments) {
  const bool to_first = name_of(operation) == "copy_" || name_of(operation) == "copy_sparse_to_sparse_";
  const auto &first = arguments[0].toTensor(), &second = arguments[1].toTensor();
  const bool non_blocking = arguments.size() > 2 && arguments[2].toBool();
  to_first ? count_copy(second, first, non_blocking) : count_copy(first, second, non_blocking);
}

}  // namespace

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool is_copy(const OperatorHandle& operation) {
  constexpr std::array<std::string_view, 4> names = {"copy_", "_copy_from", "_copy_from_and_resize",
                                                     "copy_sparse_to_sparse_"};
  return is_one_of(name_of(operation), names);
}

bool is_of_the_host_alone(const OperatorHandle& operation) {
  constexpr std::array<std::string_view, 6> names = {"set_",        "resize_",        "resize_as_",
                                                     "_coalesced_", "sparse_resize_", "record_stream"};
  if (is_one_of(name_of(operation), names)) return true;
  const auto& returns = operation.schema().returns();
  const auto& arguments = operation.schema().arguments();
  const bool writes = std::any_of(arguments.begin(), arguments.end(), is_written);
  const bool views = std::all_of(returns.begin(), returns.end(), [](auto& result) {
    return result.alias_info() || result.type()->kind() == c10::TypeKind::IntType ||
           result.type()->kind() == c10::TypeKind::BoolType;
  });
  return !writes && views;
}

void for_each_tensor(const IValue& argument, c10::function_ref<void(const at::Tensor&)> apply) {
  if (argument.isTensor() && argument.toTensor().defined()) apply(argument.toTensor());
  if (argument.isList())
    for (auto& element : argument.toListRef()) for_each_tensor(element, apply);
}

c10::DeviceIndex device_of(const OperatorHandle& operation, ArrayRef<IValue> arguments) {
  const auto first = first_device(arguments);
  const auto device = first ? first : device_argument(arguments);
  if (!device || !device->has_index()) return current_device();
  if (is_copy(operation)) return device->index();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      check_same_device(operation, operation.schema().arguments()[i], tensor, *device);
    });
  return device->index();
}

void count(const OperatorHandle& operation, ArrayRef<IValue> arguments) {
  if (is_copy(operation)) return count_copy(operation, arguments);
  if (result_is_awaited(operation, arguments)) {
    wait();
    ++counts().copies_to_host;
  } else if (is_of_the_host_alone(operation)) {
    return;
  }
  if (name_of(operation) != "_local_scalar_dense") count_launch();
}

}  // namespace emulated_cuda
