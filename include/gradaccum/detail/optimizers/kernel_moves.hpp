// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/kernels/kernel_proof.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <tuple>
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

/// The count of steps in a trial, some of which may have been left out.
inline constexpr std::int64_t trial_step = 5;

/// Steps of the same kind as `like`, of some small tensors, taken by `add(moves, steps, multiplier)`.
template <class Step, class Add>
std::vector<TrialResult> results_of_trial(const Step& like, const Multiplier& multiplier, const Add& add) {
  std::vector<Step> steps;
  for (auto& numbers : all_trial_numbers(like.parameter.device())) steps.push_back(trial_of(like, numbers));
  Moves moves;
  add(moves, steps, multiplier);
  moves.prepare();
  moves.run();
  std::vector<TrialResult> results;
  for (auto& step : steps)
    for (auto& result : results_of(step)) results.push_back(result);
  return results;
}

/// Whether a kernel does with small tensors what ATen's operations do: with a factor that the host knows, and with one
/// that the device knows, where it may leave out the step. Waits for the device.
template <class Step>
bool does_as_aten(const DeviceKernels& kernels, const Step& like) {
  const auto number = [&](double value, at::ScalarType dtype) {
    return at::full({}, value, at::TensorOptions(dtype).device(like.parameter.device()));
  };
  const Multiplier on_host{.numerator = 0.5};
  Multiplier on_device{.numerator = 3,
                       .denominator = 2,
                       .device_numerator = number(0.7, at::kDouble),
                       .device_denominator = number(1.3, at::kDouble)};
  const auto agree = [&](const Multiplier& by) {
    return are_close(results_of_trial(like, by, [&](auto&... of) { add_kernel_moves(of..., kernels); }),
                     results_of_trial(like, by, [&](auto&... of) { add_aten_moves(of...); }));
  };
  bool agreed = agree(on_host);
  for (double overflow : {0.0, 1.0}) {
    on_device.found_inf = number(overflow, at::kFloat);
    agreed = agreed && agree(on_device);
    on_device.left_out = number(2, at::kFloat);
  }
  on_device.found_inf.zero_();
  return agreed && agree(on_device);
}

/// By kernels of our own where there are any, which have shown on this device that they do what ATen does; the others
/// by ATen.
template <class Step>
void add_proved_moves(Moves& moves, const std::vector<Step>& steps, const Multiplier& multiplier) {
  const auto* const kernels = device_kernels();
  if (!kernels) return add_aten_moves(moves, steps, multiplier);
  using Kind = std::tuple<decltype(kernel_name(std::declval<Step>())), at::DeviceIndex, OperandTypes>;
  std::map<Kind, bool> known;
  const auto is_ours = [&](const Step& step) {
    if (!fits_kernel(step.parameter, step.gradient)) return false;
    const auto device = step.parameter.device();
    const Kind kind(kernel_name(step), device.index(), types_of(step));
    const auto [place, is_new] = known.try_emplace(kind, false);
    if (is_new)
      place->second = is_proved(*kernels, device, std::get<0>(kind), std::get<2>(kind),
                                [&] { return does_as_aten(*kernels, step); });
    return place->second;
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
