// SPDX-License-Identifier: Apache-2.0
// Runs steps on a device, by this library's kernels or by ATen's fused operations.
#pragma once

#include <gradaccum/detail/optimizers/device_steps.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>
#include <type_traits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns the dtypes of the kernel to call.
template <class Step>
OperandTypes types_of(const Step& step) {
  return {at::toRealValueType(step.parameter.scalar_type()),
          at::toRealValueType(gradient_type(step.parameter, step.gradient)), step.rounding_key.has_value()};
}

/// Launches our own kernel for a batch of steps, once for each mix of dtypes and each full table of tensors.
template <class Step>
void launch_kernel(const DeviceKernels& kernels, const Multiplier& by, at::Device device,
                   const std::vector<StepPart<Step>>& batch, at::TensorList parameters, at::TensorList gradients) {
  const auto& first = batch.front().step;
  using Launch = StepLaunch<std::remove_cvref_t<decltype(first.kernel_settings())>>;
  const auto kernel = first.kernel(kernels);
  const c10::DeviceGuard guard(device);
  auto* const stream = native_stream(device);
  std::map<OperandTypes, Launch> launches;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto& [step, extent] = batch[i];
    const auto types = types_of(step);
    auto found = launches.find(types);
    if (found == launches.end()) found = launches.try_emplace(types, first.kernel_settings(), by.pointers()).first;
    auto& launch = found->second;
    if (launch.tensors.full()) {
      kernel(launch, types, stream);
      launch.tensors = {};
    }
    std::array<void*, 6> arrays{parameters[i].mutable_data_ptr(), const_cast<void*>(gradients[i].const_data_ptr())};
    std::size_t next = 2;
    for (const auto* tensor : step.state()) arrays[next++] = tensor ? tensor->mutable_data_ptr() : nullptr;
    launch.tensors.add({arrays, extent.from, parameters[i].numel(), step.rounding_key.value_or(0)});
  }
  for (auto& [types, launch] : launches) kernel(launch, types, stream);
}

/// Adds steps by our own device kernels, on many tensors at a time, in one pass over their memory (Adafactor's: a few).
template <class Step>
void add_kernel_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/true, [&](const auto&, at::Device device) {
    return [&kernels, by = multiplier.moved_to(device), device](const std::vector<StepPart<Step>>& batch,
                                                                at::TensorList p, at::TensorList g) {
      launch_kernel(kernels, by, device, batch, p, g);
    };
  });
}

/// Runs ATen's fused operation for a batch. It does not advance the device's step count.
class FusedAdam {
 public:
  FusedAdam(const AdamSettings& by, const Multiplier& multiplier, at::Device device)
      : by_(by),
        count_(at::full({}, static_cast<double>(by.step), at::TensorOptions(at::kFloat).device(device))),
        found_inf_(found_inf_on(device, multiplier)) {
    // Stays at least 1, even if the state was replaced since the host last read the number of skipped steps.
    if (multiplier.skipped_steps.defined())
      count_.sub_(multiplier.skipped_steps.to(device, /*non_blocking=*/true)).clamp_min_(1);
  }

  void operator()(const std::vector<StepPart<AdamStep>>& batch, at::TensorList parameters,
                  at::TensorList gradients) const {
    std::vector<at::Tensor> m, v, x;
    for (auto& [step, extent] : batch) {
      m.push_back(as_real(extent.of(step.exp_avg)));
      v.push_back(as_real(extent.of(step.exp_avg_sq)));
      if (by_.amsgrad) x.push_back(as_real(extent.of(step.max_exp_avg_sq)));
    }
    const std::vector<at::Tensor> counts(batch.size(), count_);
    using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                       double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                       const std::optional<at::Tensor>&);
    auto* const fused = by_.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_);
    fused(parameters, gradients, m, v, x, counts, by_.lr, by_.beta1, by_.beta2, by_.weight_decay, by_.eps, by_.amsgrad,
          /*maximize=*/false, std::nullopt, found_inf_);
  }

 private:
  AdamSettings by_;
  at::Tensor count_;
  std::optional<at::Tensor> found_inf_;
};

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<AdamStep>& steps,
                                      const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](auto& batch, at::Device device) {
    return FusedAdam(batch.front().step.settings, multiplier, device);
  });
}

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](auto& steps_of_batch, at::Device device) {
    return [by = steps_of_batch.front().step.settings, found_inf = found_inf_on(device, multiplier)](
               const std::vector<StepPart<SgdStep>>& batch, at::TensorList p, at::TensorList g) {
      std::vector<at::Tensor> buffers;
      for (auto& [step, extent] : batch)
        if (by.momentum != 0) buffers.push_back(as_real(extent.of(step.momentum_buffer)));
      at::_fused_sgd_(p, g, buffers, by.weight_decay, by.momentum, by.lr, by.dampening, by.nesterov,
                      /*maximize=*/false, by.first, std::nullopt, found_inf);
    };
  });
}

/// Runs our kernels for a batch, by launches of one mix of dtypes and at most a full table, in the same scratch memory.
class AdafactorLaunches {
 public:
  using Batch = std::vector<StepPart<AdafactorStep>>;

  AdafactorLaunches(const Batch& batch, const Multiplier& multiplier, const DeviceKernels& kernels)
      : kernels_(&kernels), device_(batch.front().step.parameter.device()), by_(multiplier.moved_to(device_)) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto& step = batch[i].step;
      const auto types = types_of(step);
      auto launch = std::ranges::find_if(
          launches_, [&](const Launch& of) { return of.types == types && of.steps.size() < AdafactorTable::capacity; });
      if (launch == launches_.end()) launch = launches_.insert(launch, {types});
      launch->steps.emplace_back(i, launch->bytes);
      const auto size = static_cast<std::int64_t>(at::elementSize(state_type(step.parameter)));
      launch->bytes += AdafactorMemory::bytes(shape_of(step), size);
    }
  }

  void allocate(Scratch& scratch) {
    std::int64_t bytes = 0;
    for (auto& launch : launches_) bytes = std::max(bytes, launch.bytes);
    memory_ = scratch.tensor(bytes, at::kByte);
  }

  void operator()(const Batch& batch, at::TensorList parameters, at::TensorList gradients) const {
    const c10::DeviceGuard guard(device_);
    for (auto& launch : launches_) {
      AdafactorTable table;
      for (auto& [i, offset] : launch.steps)
        table.add(entry(batch[i].step, parameters[i], gradients[i], memory_.mutable_data_ptr<std::uint8_t>() + offset));
      kernels_->adafactor({batch.front().step.settings, by_.pointers(), table}, launch.types, native_stream(device_));
    }
  }

 private:
  struct Launch {
    OperandTypes types;
    std::vector<std::pair<std::size_t, std::int64_t>> steps = {};  // each one's index, and the offset of its memory
    std::int64_t bytes = 0;
  };

  static AdafactorShape shape_of(const AdafactorStep& step) {
    const auto& p = step.parameter;
    if (step.variance.defined()) return AdafactorShape::of_vector(p.numel());
    return AdafactorShape::of_matrices(p.numel(), p.size(-2), p.size(-1));
  }

  static AdafactorTable::Entry entry(const AdafactorStep& step, const at::Tensor& parameter, const at::Tensor& gradient,
                                     void* memory) {
    const auto data = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; };
    return {.parameter = parameter.mutable_data_ptr(),
            .gradient = gradient.const_data_ptr(),
            .row_var = data(step.variance.defined() ? step.variance : step.row_var),
            .col_var = data(step.col_var),
            .exp_avg = data(step.exp_avg),
            .memory = memory,
            .shape = shape_of(step),
            .rounding_key = step.rounding_key.value_or(0)};
  }

  const DeviceKernels* kernels_;
  at::Device device_;
  Multiplier by_;
  std::vector<Launch> launches_;
  at::Tensor memory_;
};

GRADACCUM_INLINE void add_kernel_steps(StepPlan& plan, const std::vector<AdafactorStep>& steps,
                                       const Multiplier& multiplier, const DeviceKernels& kernels) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/true,
              [&](auto& batch, at::Device) { return AdafactorLaunches(batch, multiplier, kernels); });
}

GRADACCUM_INLINE bool has_kernel(const at::Tensor& parameter, const at::Tensor& gradient) {
  const auto type = parameter.scalar_type();
  // A gradient wider than the state may exceed float32 before it is multiplied.
  return device_kernels() && parameter.is_cuda() && has_kernels(at::toRealValueType(type)) &&
         type != at::kComplexHalf && at::elementSize(gradient.scalar_type()) <= at::elementSize(state_type(parameter));
}

/// Throws if there is no kernel for the step of an optimizer that ATen lacks.
GRADACCUM_INLINE void check_has_kernel(const char* optimizer, const at::Tensor& parameter, const at::Tensor& gradient) {
  if (has_kernel(parameter, gradient)) return;
  const auto device = parameter.device();
  TORCH_CHECK(parameter.is_cuda(), optimizer, ": a parameter must be on the CPU or a CUDA device, got one on ", device,
              "; use AdamW, which steps on all devices");
  TORCH_CHECK(device_kernels(), optimizer, ": a parameter on ", device,
              " must be stepped by gradaccum's CUDA kernels, got a program that was built without them; configure it "
              "with -DGRADACCUM_CUDA=ON and link gradaccum::compiled, or use AdamW");
  TORCH_CHECK(false, optimizer, ": a gradient on ", device, " must be at most as wide as the optimizer's state (",
              state_type(parameter), "), got ", gradient.scalar_type(), "; convert it");
}

template <class Step>
void plan_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, const char* optimizer) {
  constexpr bool is_in_aten = std::is_same_v<Step, AdamStep> || std::is_same_v<Step, SgdStep>;
  std::vector<Step> ours, others;
  for (auto& step : steps) {
    if (step.parameter.numel() == 0) continue;
    if constexpr (!is_in_aten) check_has_kernel(optimizer, step.parameter, step.gradient);
    (has_kernel(step.parameter, step.gradient) ? ours : others).push_back(step);
  }
  if (!ours.empty()) add_kernel_steps(plan, ours, multiplier, *device_kernels());
  if constexpr (is_in_aten) plan_aten_steps(plan, others, multiplier);
}

#ifdef GRADACCUM_COMPILED
template void plan_steps(StepPlan&, const std::vector<AdamStep>&, const Multiplier&, const char*);
template void plan_steps(StepPlan&, const std::vector<SgdStep>&, const Multiplier&, const char*);
template void plan_steps(StepPlan&, const std::vector<Adam8bitStep>&, const Multiplier&, const char*);
template void plan_steps(StepPlan&, const std::vector<AdafactorStep>&, const Multiplier&, const char*);
#endif

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
