// SPDX-License-Identifier: Apache-2.0
// Runs steps on a device, by this library's kernels or by ATen's operations.
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/optimizers/device_batches.hpp>
#include <gradaccum/detail/optimizers/tensor_vector.hpp>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <array>
#include <map>
#include <type_traits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE StepLaunch launch_of(const AnyStep& settings, const DeviceMultiplier& by) {
  return {.settings = settings.settings,
          .numbers = settings.numbers(),
          .by = by,
          .maps = {signed_map(), second_moment_map()},
          .tensors = {}};
}

/// Launches our own kernel for a batch of steps, once for each mix of dtypes and each full table of tensors.
GRADACCUM_INLINE void launch_kernel(const DeviceKernels& kernels, const Multiplier& by, at::Device device,
                                    const StepBatch<ElementStep>& batch, at::TensorList parameters,
                                    at::TensorList gradients) {
  const auto& settings = batch.front().step.settings;
  auto* const kernel = kernels.steps[settings.kind->place];
  const c10::DeviceGuard guard(device);
  auto* const stream = native_stream(device);
  std::map<OperandTypes, StepLaunch> launches;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto& [step, extent] = batch[i];
    const auto types = types_of(step);
    auto found = launches.find(types);
    if (found == launches.end()) found = launches.try_emplace(types, launch_of(settings, by.pointers())).first;
    auto& launch = found->second;
    if (launch.tensors.full()) {
      kernel(launch, types, stream);
      launch.tensors = {};
    }
    launch.tensors.add({parameters[i].mutable_data_ptr(), gradients[i].const_data_ptr(), step.pointers(), extent.from,
                        parameters[i].numel(), step.rounding_key.value_or(0)});
  }
  for (auto& [types, launch] : launches) kernel(launch, types, stream);
}

/// Adds steps by our own device kernels, on many tensors at a time, in one pass over their memory.
GRADACCUM_INLINE void add_kernel_steps(StepPlan& plan, const std::vector<ElementStep>& steps,
                                       const Multiplier& multiplier, const DeviceKernels& kernels) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/true, [&](const auto&, at::Device device) {
    return [&kernels, by = multiplier.moved_to(device), device](const StepBatch<ElementStep>& batch, at::TensorList p,
                                                                at::TensorList g) {
      launch_kernel(kernels, by, device, batch, p, g);
    };
  });
}

/// Returns the `i`-th tensors of a batch's state; none if its steps do not use them.
GRADACCUM_INLINE std::vector<at::Tensor> states_of(const StepBatch<ElementStep>& batch, std::size_t i) {
  std::vector<at::Tensor> all;
  for (auto& [step, extent] : batch)
    if (i < step.settings.states) all.push_back(as_real(extent.of(step.state[i])));
  return all;
}

/// Returns the count of a batch's steps on the device, which ATen's fused operation does not advance.
GRADACCUM_INLINE at::Tensor step_count_on(at::Device device, const AdamStep& by, const Multiplier& multiplier) {
  auto count = at::full({}, static_cast<double>(by.step), at::TensorOptions(at::kFloat).device(device));
  // Stays at least 1, even if the state was replaced since the host last read the number of skipped steps.
  if (multiplier.skipped_steps.defined())
    count.sub_(multiplier.skipped_steps.to(device, /*non_blocking=*/true)).clamp_min_(1);
  return count;
}

GRADACCUM_INLINE void plan_fused_adam(StepPlan& plan, const std::vector<ElementStep>& steps,
                                      const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](const StepBatch<ElementStep>& of, at::Device device) {
    const auto by = of.front().step.settings.settings.as<AdamStep>();
    return [by, count = step_count_on(device, by, multiplier), found_inf = found_inf_on(device, multiplier)](
               const StepBatch<ElementStep>& batch, at::TensorList p, at::TensorList g) {
      using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                         double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                         const std::optional<at::Tensor>&);
      auto* const fused = by.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_);
      fused(p, g, states_of(batch, 0), states_of(batch, 1), states_of(batch, 2),
            std::vector<at::Tensor>(batch.size(), count), by.lr, by.beta1, by.beta2, by.weight_decay, by.eps,
            by.amsgrad, /*maximize=*/false, std::nullopt, found_inf);
    };
  });
}

GRADACCUM_INLINE void plan_fused_sgd(StepPlan& plan, const std::vector<ElementStep>& steps,
                                     const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](const StepBatch<ElementStep>& of, at::Device device) {
    return [by = of.front().step.settings.settings.as<SgdStep>(), found_inf = found_inf_on(device, multiplier)](
               const StepBatch<ElementStep>& batch, at::TensorList p, at::TensorList g) {
      at::_fused_sgd_(p, g, states_of(batch, 0), by.weight_decay, by.momentum, by.lr, by.dampening, by.nesterov,
                      /*maximize=*/false, by.first, std::nullopt, found_inf);
    };
  });
}

/// Runs the arithmetic of steps on whole tensors.
GRADACCUM_INLINE void plan_tensor_steps(StepPlan& plan, const std::vector<ElementStep>& steps,
                                        const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](auto&, at::Device device) {
    return [found_inf = found_inf_on(device, multiplier)](const StepBatch<ElementStep>& batch, at::TensorList p,
                                                          at::TensorList g) {
      for (std::size_t i = 0; i < batch.size(); ++i) {
        const auto& [step, extent] = batch[i];
        std::array<at::Tensor, 1 + most_states> all{p[i]};
        for (std::size_t k = 0; k < step.settings.kind->number_of_states; ++k)
          all[1 + k] = as_real(extent.of(step.state[k]));
        auto changed = all;
        step.settings.kind->step_tensors(step.settings.numbers(), g[i], changed.data());
        for (std::size_t k = 0; k < all.size(); ++k) {
          for (std::size_t other = 0; other < k; ++other)  // the arithmetic may have moved a tensor to another place
            if (changed[k].defined() && changed[k].is_same(all[other])) changed[k] = changed[k].clone();
          if (found_inf && changed[k].defined()) changed[k] = at::where(found_inf->to(at::kBool), all[k], changed[k]);
        }
        for (std::size_t k = 0; k < all.size(); ++k)
          if (changed[k].defined()) all[k].copy_(changed[k]);
      }
    };
  });
}

/// Returns true if a step has a kernel, which users' steps do not.
template <class Step>
bool has_kernel(const Step& step) {
  if constexpr (std::is_same_v<Step, ElementStep>)
    if (step.settings.kind->place == std::tuple_size_v<Steps>) return false;
  const auto type = step.parameter.scalar_type();
  // A gradient wider than the state may exceed float32 before it is multiplied.
  return device_kernels() && step.parameter.is_cuda() && has_kernels(at::toRealValueType(type)) &&
         type != at::kComplexHalf &&
         at::elementSize(step.gradient.scalar_type()) <= at::elementSize(state_type(step.parameter));
}

/// Throws for a step that has neither a kernel nor ATen's operations.
GRADACCUM_INLINE void fail_without_kernel(const char* optimizer, const at::Tensor& parameter,
                                          const at::Tensor& gradient) {
  const auto device = parameter.device();
  TORCH_CHECK(parameter.is_cuda(), optimizer, ": a parameter must be on the CPU or a CUDA device, got one on ", device,
              "; use AdamW, which steps on all devices");
  TORCH_CHECK(device_kernels(), optimizer, ": a parameter on ", device,
              " must be stepped by gradaccum's CUDA kernels, got a program that was built without them; configure it "
              "with -DGRADACCUM_CUDA=ON and link gradaccum::compiled, or use AdamW");
  TORCH_CHECK(false, optimizer, ": a gradient on ", device, " must be at most as wide as the optimizer's state (",
              state_type(parameter), "), got ", gradient.scalar_type(), "; convert it");
}

/// Returns the function that plans a step by ATen's operations; nullptr if there are none.
inline auto aten_steps_of(const ElementStep& step) {
  const auto& kind = *step.settings.kind;
  return !kind.plan_fused_steps && kind.step_tensors ? plan_tensor_steps : kind.plan_fused_steps;
}
inline auto aten_steps_of(const AdafactorStep&) { return StepKind().plan_fused_steps; }

template <class Step>
void plan_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, const char* optimizer) {
  std::vector<Step> ours, others;
  for (auto& step : steps) {
    if (step.parameter.numel() == 0) continue;
    if (!has_kernel(step) && !aten_steps_of(step)) fail_without_kernel(optimizer, step.parameter, step.gradient);
    (has_kernel(step) ? ours : others).push_back(step);
  }
  if (!ours.empty()) add_kernel_steps(plan, ours, multiplier, *device_kernels());
  if constexpr (std::is_same_v<Step, ElementStep>)
    if (!others.empty()) aten_steps_of(others.front())(plan, others, multiplier);
}

template <class Step>
constexpr StepKind make_kind() {
  auto kind = described<Step>();
  kind.kernel = kernel_of<Step>;
  if constexpr (std::is_same_v<Step, AdamStep>)
    kind.plan_fused_steps = plan_fused_adam;
  else if constexpr (std::is_same_v<Step, SgdStep>)
    kind.plan_fused_steps = plan_fused_sgd;
  else if constexpr (!std::is_same_v<Step, Adam8bitStep>)
    kind.step_tensors = step_tensors<Step>;
  return kind;
}

#ifdef GRADACCUM_COMPILED
template <class... Step>
constexpr std::array<StepKind, sizeof...(Step)> make_kinds(std::type_identity<std::tuple<Step...>>) {
  return {make_kind<Step>()...};
}
GRADACCUM_INLINE const StepKind& kind_at(std::size_t place) {
  static constexpr auto kinds = make_kinds(std::type_identity<Steps>());
  return kinds[place];
}
template void plan_steps(StepPlan&, const std::vector<ElementStep>&, const Multiplier&, const char*);
template void plan_steps(StepPlan&, const std::vector<AdafactorStep>&, const Multiplier&, const char*);
#else
template <class Step>
const StepKind& kind_in_list() {
  static constexpr auto kind = make_kind<Step>();
  return kind;
}
#endif

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
