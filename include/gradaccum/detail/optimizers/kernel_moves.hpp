// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/kernels/kernel_proof.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
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

/// Steps of parameters on devices by kernels of our own, many tensors at a time, in one pass over their memory.
///
/// A type of steps has `kernel_name(step)`, `kernel_of(kernels, step)`, `kernel_settings(step)`; `kernel_arrays(step)`,
/// its state in the order of the kernel's operand; `trial_of(step, numbers)`, a small one of the same kind, and
/// `results_of(step)`; and `add_aten_moves(moves, steps, multiplier)`.

/// A factor and an overflow flag where a device's kernel reads them, kept while it may.
class DeviceFactor {
 public:
  DeviceFactor(const Multiplier& by, at::Device device);
  DeviceMultiplier pointers() const;

 private:
  Multiplier by_;
};

/// Whether kernels take them as they are, or copies of the same dtype.
bool fits_kernel(const at::Tensor& parameter, const at::Tensor& gradient);

/// The dtypes that the kernel meets.
OperandTypes kernel_types(const at::Tensor& parameter, const at::Tensor& gradient, bool rounded);
template <class Step>
OperandTypes types_of(const Step& step) {
  return kernel_types(step.parameter, step.gradient, step.rounding_key.has_value());
}

/// A batch of steps as launches of a kernel: one for each mix of dtypes, and for as many tensors as a table has.
template <class Step>
class KernelBatch {
 public:
  KernelBatch(const DeviceKernels& kernels, const Multiplier& multiplier, at::Device device)
      : kernels_(&kernels), by_(multiplier, device), device_(device) {}

  void operator()(const std::vector<StepPart<Step>>& batch, at::TensorList parameters, at::TensorList gradients) const {
    const auto& first = batch.front().step;
    using Launch = StepLaunch<decltype(kernel_settings(first))>;
    const auto kernel = kernel_of(*kernels_, first);
    const c10::DeviceGuard guard(device_);
    auto* const stream = native_stream(device_);
    std::map<OperandTypes, Launch> launches;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto& step = batch[i].step;
      const auto types = types_of(step);
      auto& launch =
          launches.try_emplace(types, Launch{kernel_settings(first), by_.pointers(), TensorTable()}).first->second;
      if (launch.tensors.full()) {
        kernel(launch, types, stream);
        launch.tensors = {};
      }
      launch.tensors.add(arrays(step, parameters[i], gradients[i]), parameters[i].numel(),
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
  DeviceFactor by_;
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

/// Whether a kernel does with small tensors what ATen's operations do. Waits for the device.
template <class Step>
bool does_as_aten(const DeviceKernels& kernels, const Step& like) {
  const auto device = like.parameter.device();
  const Multiplier by{.numerator = 0.5, .found_inf = at::zeros({}, at::TensorOptions(at::kFloat).device(device))};
  const std::vector<Step> ours{trial_of(like, TrialNumbers(device))}, atens{trial_of(like, TrialNumbers(device))};
  Moves our_moves, aten_moves;
  add_kernel_moves(our_moves, ours, by, kernels);
  add_aten_moves(aten_moves, atens, by);
  for (auto* const moves : {&our_moves, &aten_moves}) {
    moves->prepare();
    moves->run();
  }
  return are_close(results_of(ours.front()), results_of(atens.front()));
}

/// By kernels of our own where there are any, which have shown on this device that they do what ATen does; the others
/// by ATen.
template <class Step>
void add_proved_moves(Moves& moves, const std::vector<Step>& steps, const Multiplier& multiplier) {
  const auto* const kernels = device_kernels();
  if (!kernels) return add_aten_moves(moves, steps, multiplier);
  const auto is_ours = [&](const Step& step) {
    return fits_kernel(step.parameter, step.gradient) &&
           is_proved(*kernels, step.parameter.device(), kernel_name(step), types_of(step),
                     [&] { return does_as_aten(*kernels, step); });
  };
  std::vector<Step> ours, others;
  std::partition_copy(steps.begin(), steps.end(), std::back_inserter(ours), std::back_inserter(others), is_ours);
  add_kernel_moves(moves, ours, multiplier, *kernels);
  add_aten_moves(moves, others, multiplier);
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/kernel_moves.ipp>
#endif
