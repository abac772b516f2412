// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/one_pass_optimizer.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/moves.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/optimizers/take_steps.hpp>
#include <gradaccum/detail/window/gradient_watch.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <typeinfo>
#include <utility>

namespace gradaccum::detail {

inline constexpr const char *saved_rounding = "rounding_steps", *saved_rounding_of = "rounding_step.";

GRADACCUM_INLINE at::Tensor OnePass::step_after(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  settle();
  at::NoGradGuard no_grad;
  check_distinct();
  move(GradientOf(), {});
  return loss;
}

GRADACCUM_INLINE void OnePass::step(Gradients gradients) {
  const bool left_to_device = judges_on_device(gradients);
  if (!left_to_device && gradients.overflowed()) return;
  const GradientOf gradient_of(gradients);
  bool any = gradient_of.empty();
  for_each_parameter(itself(), [&](const at::Tensor& parameter) { any = any || gradient_of(parameter).defined(); });
  TORCH_CHECK(any, class_name(), ": step(gradients) was given those of other parameters than the optimizer's");
  if (left_to_device) return move_unless_overflowed(gradient_of, std::move(gradients));
  settle();
  at::NoGradGuard no_grad;
  check_distinct();
  move(gradient_of, product_of(gradients));
}

GRADACCUM_INLINE bool OnePass::judges_on_device(const Gradients& gradients) const {
  if (!gradients.may_be_judged_on_device()) return false;
  if (gradients.judged() && !gradients.judged_on_device()) return false;  // the host knows
  const auto parameters = gradients.parameters();
  return std::none_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) { return p.is_cpu(); });
}

/// Makes a 0-dim float32 tensor that can be changed after an InferenceMode that it is made in. Steps are counted as if
/// all were taken, and this tensor gives the device the number of those that were not.
GRADACCUM_INLINE at::Tensor number_that_changes(at::Device device) {
  const c10::InferenceMode usable_afterwards(false);
  return at::zeros({}, at::TensorOptions(at::kFloat).device(device));
}

GRADACCUM_INLINE void OnePass::move_unless_overflowed(const GradientOf& gradient_of, Gradients gradients) {
  at::NoGradGuard no_grad;
  auto by = product_of(gradients);
  auto parameters = gradients.parameters();
  if (!same_parameters(parameters, concerned_)) settle();
  by.found_inf = gradients.judge_on_device();
  check_distinct();
  if (!counts_steps()) return move(gradient_of, by);
  if (left_out_.defined()) by.left_out = left_out_.to(by.found_inf.device());
  auto left_out = by.left_out.defined() ? by.left_out : number_that_changes(by.found_inf.device());
  move(gradient_of, by);
  left_out_ = left_out.add_(by.found_inf);
  concerned_ = std::move(parameters);
}

GRADACCUM_INLINE void OnePass::settle() const {
  if (!left_out_.defined()) return;
  const auto steps = static_cast<std::int64_t>(left_out_.item<float>());
  left_out_.reset();
  for (auto& parameter : std::exchange(concerned_, {})) const_cast<OnePass&>(*this).uncount(parameter, steps);
}

GRADACCUM_INLINE void OnePass::run(Moves& moves, StochasticRounding rounding) {
  moves.prepare();
  rounding_ = std::move(rounding);
  moves.run();
}

GRADACCUM_INLINE NamedTensors OnePass::named_state(const NamedParameters& parameters) const {
  settle();
  const NameOf name_of(parameters);
  auto all = named_state_of(itself(), name_of);
  std::size_t place = 0;
  for_each_parameter(itself(), [&](const at::Tensor& parameter) {
    if (const auto steps = rounding_.steps_of(place++); steps > 0)
      all.emplace(saved_rounding_of + name_of(parameter), at::scalar_tensor(static_cast<double>(steps), at::kDouble));
  });
  return all;
}

GRADACCUM_INLINE void OnePass::load_named_state(const NamedParameters& parameters, NamedTensors state) {
  take_named_state(parameters, std::move(state), /*lenient=*/false)();
}

GRADACCUM_INLINE std::function<void()> OnePass::take_named_state(const NamedParameters& parameters, NamedTensors state,
                                                                 bool lenient) {
  const NameOf name_of(parameters);
  std::vector<std::int64_t> steps;
  for_each_parameter(itself(), [&](const at::Tensor& parameter) {
    steps.push_back(taken_count(state, saved_rounding_of + name_of(parameter)).value_or(0));
  });
  const auto become = take_states(itself(), *new_state(), name_of, state, lenient);
  TORCH_CHECK(lenient || state.empty(), class_name(),
              ": load_named_state: there is no parameter, or no such state, for ",
              state.empty() ? "" : state.begin()->first);
  return [this, become, steps] {
    settle();
    rounding_.set_steps(steps);
    become();
  };
}

GRADACCUM_INLINE void OnePass::save_rounding(torch::serialize::OutputArchive& archive) const {
  if (!rounding_.steps().empty()) archive.write(saved_rounding, c10::IValue(rounding_.steps()));
}

GRADACCUM_INLINE void OnePass::load_rounding(torch::serialize::InputArchive& archive) {
  c10::IValue steps;
  rounding_.set_steps(archive.try_read(saved_rounding, steps) ? steps.toIntVector() : std::vector<std::int64_t>());
}

template <class Derived, class Base, class State>
OnePassOptimizer<Derived, Base, State>::~OnePassOptimizer() = default;

template <class Derived, class Base, class State>
at::Tensor OnePassOptimizer<Derived, Base, State>::step(torch::optim::Optimizer::LossClosure closure) {
  return this->step_after(closure);
}

template <class Derived, class Base, class State>
bool OnePassOptimizer<Derived, Base, State>::steps_by_elements() const {
  return typeid(*this) == typeid(Derived) && !this->rounds_any();
}

template <class Derived, class Base, class State>
void OnePassOptimizer<Derived, Base, State>::save(torch::serialize::OutputArchive& archive) const {
  this->settle();
  make_dense(*this);
  Base::save(archive);
  this->save_rounding(archive);
}

template <class Derived, class Base, class State>
void OnePassOptimizer<Derived, Base, State>::load(torch::serialize::InputArchive& archive) {
  this->settle();
  Base::load(archive);
  make_dense(*this);  // LibTorch's SGD may have saved the sum of sparse gradients
  this->load_rounding(archive);
}

template <class Derived, class Base, class State>
const State* OnePassOptimizer<Derived, Base, State>::known_state(const at::Tensor& parameter) const {
  const auto known = this->state_.find(parameter.unsafeGetTensorImpl());
  return known == this->state_.end() ? nullptr : static_cast<const State*>(known->second.get());
}

template <class Derived, class Base, class State>
State& OnePassOptimizer<Derived, Base, State>::kept_state(const at::Tensor& parameter) {
  auto& state = this->state_[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

template <class Derived, class Base, class State>
bool OnePassOptimizer<Derived, Base, State>::counts_steps() const {
  return requires(State & state) { state.step(state.step()); };
}

template <class Derived, class Base, class State>
void OnePassOptimizer<Derived, Base, State>::uncount(const at::Tensor& parameter, std::int64_t steps) {
  if constexpr (requires(State & state) { state.step(state.step() - steps); })
    if (auto* const state = const_cast<State*>(known_state(parameter))) state->step(state->step() - steps);
}

template <class Derived, class Base, class State>
torch::optim::Optimizer& OnePassOptimizer<Derived, Base, State>::itself() {
  return *this;
}

template <class Derived, class Base, class State>
const char* OnePassOptimizer<Derived, Base, State>::class_name() const {
  return Derived::name;
}

template <class Derived, class Base, class State>
std::unique_ptr<torch::optim::OptimizerParamState> OnePassOptimizer<Derived, Base, State>::new_state() const {
  return std::make_unique<State>();
}

}  // namespace gradaccum::detail

#ifdef GRADACCUM_COMPILED
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

namespace gradaccum::detail {
template class OnePassOptimizer<optim::SGD, torch::optim::SGD, torch::optim::SGDParamState>;
template class OnePassOptimizer<optim::Adam, torch::optim::Adam, torch::optim::AdamParamState>;
template class OnePassOptimizer<optim::AdamW, torch::optim::AdamW, torch::optim::AdamWParamState>;
template class OnePassOptimizer<optim::Adam8bit, torch::optim::Optimizer, optim::Adam8bitParamState>;
template class OnePassOptimizer<optim::AdamW8bit, torch::optim::Optimizer, optim::Adam8bitParamState>;
template class OnePassOptimizer<optim::Adafactor, torch::optim::Optimizer, optim::AdafactorParamState>;
}  // namespace gradaccum::detail
#endif
