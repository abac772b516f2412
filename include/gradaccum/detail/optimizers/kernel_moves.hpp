// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Steps by our own device kernels, on many tensors at a time, in one pass over their memory.
///
/// A step type provides `kernel_of(kernels, step)`, `kernel_settings(step)`, `kernel_arrays(step)`, which is its state
/// in the order of the kernel's operand, and `add_aten_moves(moves, steps, multiplier)`.

/// True if kernels can take the tensors, or copies of the same dtype.
bool fits_kernel(const at::Tensor& parameter, const at::Tensor& gradient);

/// Returns the dtypes of the kernel to call.
OperandTypes kernel_types(const at::Tensor& parameter, const at::Tensor& gradient, bool rounded);
template <class Step>
OperandTypes types_of(const Step& step) {
  return kernel_types(step.parameter, step.gradient, step.rounding_key.has_value());
}

/// Launches a kernel for a batch of steps, once for each mix of dtypes and each full table of tensors.
template <class Step>
class KernelBatch {
 public:
  KernelBatch(const DeviceKernels& kernels, const Multiplier& multiplier, at::Device device)
      : kernels_(&kernels), by_(multiplier.moved_to(device)), device_(device) {}

  void operator()(const std::vector<StepPart<Step>>& batch, at::TensorList parameters, at::TensorList gradients) const {
    const auto& first = batch.front().step;
    using Launch = StepLaunch<decltype(kernel_settings(first))>;
    const auto kernel = kernel_of(*kernels_, first);
    const c10::DeviceGuard guard(device_);
    auto* const stream = native_stream(device_);
    std::map<OperandTypes, Launch> launches;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto& [step, extent] = batch[i];
      const auto types = types_of(step);
      auto found = launches.find(types);
      if (found == launches.end()) found = launches.try_emplace(types, kernel_settings(first), by_.pointers()).first;
      auto& launch = found->second;
      if (launch.tensors.full()) {
        kernel(launch, types, stream);
        launch.tensors = {};
      }
      launch.tensors.add(arrays(step, parameters[i], gradients[i]), extent.from, parameters[i].numel(),
                         step.rounding_key.value_or(0));
    }
    for (auto& [types, launch] : launches) kernel(launch, types, stream);
  }

 private:
  static std::array<void*, 6> arrays(const Step& step, const at::Tensor& parameter, const at::Tensor& gradient) {
    std::array<void*, 6> all{parameter.mutable_data_ptr(), const_cast<void*>(gradient.const_data_ptr())};
    std::size_t place = 2;
    for (auto& state : kernel_arrays(step)) all[place++] = state.defined() ? state.mutable_data_ptr() : nullptr;
    return all;
  }

  const DeviceKernels* kernels_;
  Multiplier by_;
  at::Device device_;
};

template <class Step>
void add_kernel_moves(Moves& moves, const std::vector<Step>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels) {
  for (auto& batch : batches_of(steps, /*multiplied=*/false, /*by_kernel=*/true)) {
    const auto device = batch.front().step.parameter.device();
    moves.add(device, std::make_unique<BatchMove<Step, KernelBatch<Step>>>(
                          std::move(batch), Multiplier(), KernelBatch<Step>(kernels, multiplier, device),
                          /*by_kernel=*/true));
  }
}

/// Adds steps by our own kernels if these support the dtypes, and the others by ATen.
template <class Step>
void add_moves_by_kernels(Moves& moves, const std::vector<Step>& steps, const Multiplier& multiplier) {
  const auto* const kernels = device_kernels();
  if (!kernels) return add_aten_moves(moves, steps, multiplier);
  const auto is_ours = [](const Step& step) { return fits_kernel(step.parameter, step.gradient); };
  std::vector<Step> ours, others;
  std::partition_copy(steps.begin(), steps.end(), std::back_inserter(ours), std::back_inserter(others), is_ours);
  add_kernel_moves(moves, ours, multiplier, *kernels);
  add_aten_moves(moves, others, multiplier);
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/kernel_moves.ipp>
#endif
