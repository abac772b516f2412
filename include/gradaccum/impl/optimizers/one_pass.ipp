// SPDX-License-Identifier: Apache-2.0
// From a window's gradients to a step for each parameter.
#pragma once

#include <gradaccum/detail/optimizers/one_pass.hpp>

#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <iterator>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

inline constexpr const char *saved_rounding = "rounding_steps", *saved_rounding_of = "rounding_step.";

/// Mixes a number's bits into all 64, as the SplitMix64 generator does.
GRADACCUM_INLINE std::uint64_t scattered(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Steps the rows of a sparse gradient on a device: by index, without memory or synchronization; but after coalescing,
/// which synchronizes, if several dimensions are sparse or algorithms must be deterministic.
GRADACCUM_INLINE std::function<void()> row_step_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                   const Multiplier& multiplier, double lr) {
  auto rows = gradient.to(state_type(parameter), /*non_blocking=*/false, /*copy=*/true);
  multiply_({rows}, multiplier);
  const bool by_number = rows.sparse_dim() == 1 && !at::globalContext().deterministicAlgorithms();
  if (!by_number) rows = rows.coalesce();
  if (const auto found_inf = found_inf_on(parameter.device(), multiplier))
    rows._values().masked_fill_(found_inf->to(at::kBool), 0);
  rows._values().mul_(-lr);  // before rounding to the parameter's dtype
  rows = rows.to(parameter.scalar_type());
  if (by_number)
    return [parameter, numbers = rows._indices()[0], values = rows._values()] {
      parameter.index_add_(0, numbers, values);
    };
  return [parameter, rows] { parameter.add_(rows); };
}

GRADACCUM_INLINE void check_has_named_state(torch::optim::Optimizer& optimizer, const NamedParameters& parameters) {
  TORCH_CHECK(dynamic_cast<optim::OnePass*>(&optimizer) || new_state_of(optimizer),
              "OptimizerState: ", type_name(optimizer),
              " must be an optimizer of LibTorch or gradaccum, except LBFGS, or have a member void "
              "state(ga::Archive&), which is not seen in a MultiOptimizer or behind a torch::optim::Optimizer&");
  for_each_parameter(optimizer, [name_of = NameOf(parameters)](const at::Tensor& parameter) { name_of(parameter); });
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE at::Tensor OnePass::step_after(const torch::optim::Optimizer::LossClosure& closure) {
  const auto loss = detail::loss_of(closure);
  sync_step_count();
  at::NoGradGuard no_grad;
  check_distinct();
  prepare_steps(detail::GradientOf(), {})();
  return loss;
}

GRADACCUM_INLINE void OnePass::step(Gradients gradients) { OnePass::prepare(std::move(gradients))(); }

GRADACCUM_INLINE detail::PreparedStep OnePass::prepare(Gradients gradients) {
  const bool left_to_device = judges_on_device(gradients);
  if (gradients.rejected() || (!left_to_device && gradients.overflowed())) return [] {};
  const detail::GradientOf gradient_of(gradients);
  bool any = gradient_of.empty();
  detail::for_each_parameter(itself(), [&](auto& parameter) { any = any || gradient_of(parameter).defined(); });
  TORCH_CHECK(any, class_name(),
              ": step(gradients) must get gradients of the optimizer's parameters, got those of other parameters");
  at::NoGradGuard no_grad;
  auto by = product_of(gradients);
  if (!left_to_device) {
    sync_step_count();
    check_distinct();
    return prepare_steps(gradient_of, by);
  }
  // Counts the step as if it were taken. `skipped_steps_` counts on the device the steps that were not.
  auto parameters = gradients.parameters();
  if (!detail::same_parameters(parameters, concerned_)) sync_step_count();
  by.found_inf = gradients.judge_on_device();
  check_distinct();
  if (!counts_steps()) return prepare_steps(gradient_of, by);
  const auto device = by.found_inf.device();
  if (skipped_steps_.defined()) by.skipped_steps = skipped_steps_.to(device);
  auto skipped_steps = by.skipped_steps;
  if (!skipped_steps.defined()) {
    const c10::InferenceMode can_be_changed_after_it(false);
    skipped_steps = at::zeros({}, at::TensorOptions(at::kFloat).device(device));
  }
  return [this, run = prepare_steps(gradient_of, by), skipped_steps, found_inf = by.found_inf, parameters]() mutable {
    run();
    const at::NoGradGuard without_graph;
    skipped_steps_ = skipped_steps.add_(found_inf);
    concerned_ = std::move(parameters);
  };
}

GRADACCUM_INLINE bool OnePass::judges_on_device(const Gradients& gradients) const {
  if (!gradients.may_be_judged_on_device()) return false;
  if (gradients.judged() && !gradients.judged_on_device()) return false;  // the host knows the result
  return std::ranges::none_of(gradients.parameters(), [](const at::Tensor& parameter) { return parameter.is_cpu(); });
}

GRADACCUM_INLINE void OnePass::sync_step_count() const {
  if (!skipped_steps_.defined()) return;
  const auto steps = static_cast<std::int64_t>(skipped_steps_.item<float>());
  skipped_steps_.reset();
  auto& states = const_cast<OnePass&>(*this).itself().state();
  for (auto& parameter : std::exchange(concerned_, {}))
    if (const auto known = states.find(parameter.unsafeGetTensorImpl()); known != states.end())
      if (auto* const count = detail::step_count_of(*known->second)) *count -= steps;
}

/// Throws if a parameter is listed twice, because two threads would step it. Cheap while the list is unchanged.
GRADACCUM_INLINE void OnePass::check_distinct() {
  std::size_t i = 0;
  bool same = true;
  detail::for_each_parameter(itself(), [&](const at::Tensor& parameter) {
    same = same && i < distinct_.size() && distinct_[i] == parameter.unsafeGetTensorImpl();
    ++i;
  });
  if (same && i == distinct_.size()) return;
  std::unordered_map<const void*, std::size_t> indices;
  std::vector<const void*> all;
  detail::for_each_parameter(itself(), [&](const at::Tensor& parameter) {
    TORCH_CHECK(!parameter.is_meta(), class_name(), ": a parameter must have memory, got one on the meta device");
    all.push_back(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(indices.emplace(all.back(), indices.size()).second, class_name(), ": a parameter of shape ",
                parameter.sizes(), " is listed twice; list it once, in one group");
  });
  distinct_ = std::move(all);
  indices_ = std::move(indices);
}

/// Makes the keys of the random numbers that round bfloat16 parameters. They depend on the seed, the parameter's index
/// in the optimizer and the number of its rounded steps, but not on threads or other parameters.
template <class Step>
void OnePass::set_rounding_keys(std::vector<Step>& steps, std::vector<std::int64_t>& rounded_steps) const {
  for (auto& step : steps)
    if (rounds(step.parameter)) {
      const auto index = indices_.at(step.parameter.unsafeGetTensorImpl());
      if (rounded_steps.size() <= index) rounded_steps.resize(index + 1);
      const auto count = static_cast<std::uint64_t>(rounded_steps[index]++);
      step.rounding_key = detail::scattered(detail::scattered(detail::scattered(*rounding_seed_) + index) + count);
    }
}

template <class Step>
detail::PreparedStep OnePass::prepared(detail::StepPlan plan, const detail::Multiplier& multiplier,
                                       std::vector<Step> steps, std::function<void(std::vector<Step>& steps)> finish) {
  auto rounded_steps = rounded_steps_;  // kept once nothing can fail any more
  set_rounding_keys(steps, rounded_steps);
  const auto on_cpu = [](auto& step) { return step.parameter.is_cpu(); };
  const bool any_on_cpu = std::ranges::any_of(steps, on_cpu);
  if (any_on_cpu) {
    std::vector<Step> on_devices;
    std::ranges::remove_copy_if(steps, std::back_inserter(on_devices), on_cpu);
    if (!on_devices.empty()) plan_steps(plan, on_devices, multiplier, class_name());
  } else {
    plan_steps(plan, steps, multiplier, class_name());
  }
  const double on_host = any_on_cpu ? detail::host_number(multiplier) : 1;
  plan.allocate();
  auto run = [this, plan = std::move(plan), steps = std::move(steps), any_on_cpu, on_host,
              rounded_steps = std::move(rounded_steps), finish = std::move(finish)]() mutable {
    const at::NoGradGuard no_grad;
    rounded_steps_ = std::move(rounded_steps);
    plan.run();  // first, since the processor's part may wait for devices
    if (any_on_cpu) step_on_cpu(steps, on_host);
    at::autocast::clear_cache();  // its casts are of the old parameters
    finish(steps);
  };
  return [shared = std::make_shared<decltype(run)>(std::move(run))] { (*shared)(); };  // a plan cannot be copied
}

/// Each parameter's state changes only after all steps.
GRADACCUM_INLINE detail::PreparedStep ElementSteps::prepare_steps(const detail::GradientOf& gradient_of,
                                                                  const detail::Multiplier& multiplier) {
  std::vector<detail::ElementStep> steps;
  detail::StepPlan plan;
  auto& states = itself().state();
  std::unique_ptr<torch::optim::OptimizerParamState> fresh;  // for parameters without a state
  for (auto& group : itself().param_groups()) {
    check_options(group.options());  // may have been changed or loaded
    for (auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      if (!gradient.defined()) continue;
      detail::check_can_be_stepped(class_name(), parameter, gradient);
      const auto known = states.find(parameter.unsafeGetTensorImpl());
      if (known == states.end() && !fresh) fresh = new_state();
      auto& state = known == states.end() ? *fresh : *known->second;
      detail::ElementStep step{step_of(group.options(), parameter, state), parameter, gradient, {}};
      if (gradient.is_sparse() && !parameter.is_cpu() && !rounds(parameter) && step.settings.only_adds_gradient) {
        plan.add(detail::row_step_of(parameter, gradient, multiplier, step.settings.settings.as<detail::SgdStep>().lr));
        continue;
      }
      const auto parts = parts_of(state);
      for (std::size_t i = 0; i < parts.tensors.size(); ++i)
        if (parts.tensors[i]) step.state[i] = *parts.tensors[i];
      detail::prepare(step, multiplier);
      steps.push_back(std::move(step));
    }
  }
  const auto place = [](const detail::ElementStep& step) { return step.settings.kind->place; };
  if (!std::ranges::is_sorted(steps, {}, place)) std::ranges::stable_sort(steps, {}, place);  // for few launches
  return prepared<detail::ElementStep>(std::move(plan), multiplier, std::move(steps), [this, &states](auto& stepped) {
    for (auto& step : stepped) {
      if (step.settings.states == 0 && !counts_steps()) continue;
      auto& state = states[step.parameter.unsafeGetTensorImpl()];
      if (!state) state = new_state();
      const auto parts = parts_of(*state);
      for (std::size_t i = 0; i < parts.tensors.size(); ++i)
        if (parts.tensors[i]) *parts.tensors[i] = stored_state(step, i);
      if (parts.step) ++*parts.step;
    }
  });
}

GRADACCUM_INLINE void OnePass::begin_saving() const {
  sync_step_count();
  detail::make_dense(itself());
}

GRADACCUM_INLINE void OnePass::end_saving(torch::serialize::OutputArchive& archive) const {
  if (!rounded_steps_.empty()) archive.write(detail::saved_rounding, c10::IValue(rounded_steps_));
}

GRADACCUM_INLINE void OnePass::end_loading(torch::serialize::InputArchive& archive) {
  detail::make_dense(itself());  // LibTorch's SGD may have saved the sum of sparse gradients
  c10::IValue steps;
  set_rounded_steps(archive.try_read(detail::saved_rounding, steps) ? steps.toIntVector()
                                                                    : std::vector<std::int64_t>());
}

GRADACCUM_INLINE std::map<std::string, at::Tensor> OnePass::named_state(
    const torch::OrderedDict<std::string, at::Tensor>& parameters) const {
  sync_step_count();
  const detail::NameOf name_of(parameters);
  auto all = detail::named_state_of(itself(), name_of);
  std::size_t index = 0;
  detail::for_each_parameter(itself(), [&](const at::Tensor& parameter) {
    const auto steps = index < rounded_steps_.size() ? rounded_steps_[index] : 0;
    if (steps > 0)
      all.emplace(detail::saved_rounding_of + name_of(parameter),
                  at::scalar_tensor(static_cast<double>(steps), at::kDouble));
    ++index;
  });
  return all;
}

GRADACCUM_INLINE std::function<void()> OnePass::take_named_state(const detail::NamedParameters& parameters,
                                                                 detail::NamedTensors state, bool lenient) {
  const detail::NameOf name_of(parameters);
  std::vector<std::int64_t> steps;
  detail::for_each_parameter(itself(), [&](const at::Tensor& parameter) {
    steps.push_back(detail::extract_count(state, detail::saved_rounding_of + name_of(parameter)).value_or(0));
  });
  const auto become = detail::prepare_states(itself(), *new_state(), name_of, state, lenient);
  TORCH_CHECK(lenient || state.empty(), class_name(),
              ": load_named_state: no parameter or state of this optimizer matches ",
              state.empty() ? "" : state.begin()->first);
  return [this, become, steps] {
    sync_step_count();
    set_rounded_steps(steps);
    become();
  };
}

GRADACCUM_INLINE void OnePass::set_rounded_steps(std::vector<std::int64_t> steps) {
  for (auto count : steps) TORCH_CHECK(count >= 0, "stochastic_rounding: a step count must be >= 0, got ", count);
  rounded_steps_ = std::move(steps);
}

#ifdef GRADACCUM_COMPILED
template detail::PreparedStep OnePass::prepared(detail::StepPlan, const detail::Multiplier&,
                                                std::vector<detail::ElementStep>,
                                                std::function<void(std::vector<detail::ElementStep>&)>);
template detail::PreparedStep OnePass::prepared(detail::StepPlan, const detail::Multiplier&,
                                                std::vector<detail::AdafactorStep>,
                                                std::function<void(std::vector<detail::AdafactorStep>&)>);
#endif

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
