// SPDX-License-Identifier: Apache-2.0
#include "fallback.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace emulated_cuda {
namespace {

using torch::CppFunction;

std::string name_of(const c10::OperatorName& operation) {
  return operation.overload_name.empty() ? operation.name : operation.name + "." + operation.overload_name;
}

/// Returns whether the CPU has a kernel for an operation that can also be composed of others. Composition would take
/// precedence over the fallback, and its bits would differ from the CPU's.
bool is_composed_elsewhere(const c10::OperatorHandle& operation, c10::DispatchKey key) {
  return operation.hasKernelForDispatchKey(key) &&
         (operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
          operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
}

/// Returns whether an operation must stay one kernel: LibTorch chooses a convolution's kernels by the kind of device,
/// and when composed, these losses warn of a result of another size, and indexing checks a mask twice.
bool is_one_kernel(std::string_view name) {
  constexpr std::array<std::string_view, 5> names = {"aten::convolution", "aten::convolution_backward",
                                                     "aten::mse_loss", "aten::smooth_l1_loss", "aten::index.Tensor"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Returns whether another file registers the operation.
bool is_done_otherwise(std::string_view name) {
  return name == "aten::native_dropout" || name == "aten::native_dropout_backward";
}

bool is_of_lists(std::string_view name) { return name.starts_with("aten::_foreach_"); }

template <class Register>
void for_each_operation(Register&& apply) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames())
    if (name.name.starts_with("aten::"))
      if (const auto operation = dispatcher.findSchema(name)) apply(*operation, name);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, library) {
  library.fallback(CppFunction::makeFromBoxedFunction<&run_sparse_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for_each_operation([&](const c10::OperatorHandle& operation, const c10::OperatorName& name) {
    if (is_done_otherwise(name.name)) return;
    if (is_of_lists(name.name))
      library.impl(name_of(name).c_str(), CppFunction::makeFromBoxedFunction<&run_list_on_host>());
    else if (is_one_kernel(name_of(name)) || is_composed_elsewhere(operation, c10::DispatchKey::CPU))
      library.impl(name_of(name).c_str(), CppFunction::makeFromBoxedFunction<&run_on_host>());
  });
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  for_each_operation([&](const c10::OperatorHandle& operation, const c10::OperatorName& name) {
    if (is_composed_elsewhere(operation, c10::DispatchKey::SparseCPU))
      library.impl(name_of(name).c_str(), CppFunction::makeFromBoxedFunction<&run_sparse_on_host>());
  });
}

}  // namespace
}  // namespace emulated_cuda
