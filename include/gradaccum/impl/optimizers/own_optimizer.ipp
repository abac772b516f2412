// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/own_optimizer.hpp>

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/optimizers/step_plan.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <typeinfo>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

inline constexpr const char *saved_rounding = "rounding_steps", *saved_rounding_of = "rounding_step.";

GRADACCUM_INLINE at::Tensor OnePass::step_after(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  sync_step_count();
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
  sync_step_count();
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
  if (!same_parameters(parameters, concerned_)) sync_step_count();
  by.found_inf = gradients.judge_on_device();
  check_distinct();
  if (!counts_steps()) return move(gradient_of, by);
  if (skipped_steps_.defined()) by.skipped_steps = skipped_steps_.to(by.found_inf.device());
  auto skipped_steps = by.skipped_steps.defined() ? by.skipped_steps : number_that_changes(by.found_inf.device());
  move(gradient_of, by);
  skipped_steps_ = skipped_steps.add_(by.found_inf);
  concerned_ = std::move(parameters);
}

GRADACCUM_INLINE void OnePass::sync_step_count() const {
  if (!skipped_steps_.defined()) return;
  const auto steps = static_cast<std::int64_t>(skipped_steps_.item<float>());
  skipped_steps_.reset();
  for (auto& parameter : std::exchange(concerned_, {})) const_cast<OnePass&>(*this).uncount(parameter, steps);
}

GRADACCUM_INLINE void OnePass::run(StepPlan& moves, StochasticRounding rounding) {
  moves.prepare();
  rounding_ = std::move(rounding);
  moves.run();
}

GRADACCUM_INLINE NamedTensors OnePass::named_state(const NamedParameters& parameters) const {
  sync_step_count();
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
    sync_step_count();
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
  this->sync_step_count();
  make_dense(*this);
  Base::save(archive);
  this->save_rounding(archive);
}

template <class Derived, class Base, class State>
void OnePassOptimizer<Derived, Base, State>::load(torch::serialize::InputArchive& archive) {
  this->sync_step_count();
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

namespace gradaccum::detail {

template <class Derived, class Options, class State>
OwnOptimizer<Derived, Options, State>::OwnOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                                    Options defaults)
    : OwnOptimizer::OnePassOptimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                                     std::make_unique<Options>(defaults)) {
  Derived::check(defaults);
  for (auto& group : groups) add_param_group(group);
}

template <class Derived, class Options, class State>
OwnOptimizer<Derived, Options, State>::OwnOptimizer(std::vector<at::Tensor> parameters, Options defaults)
    : OwnOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

template <class Derived, class Options, class State>
OwnOptimizer<Derived, Options, State>::~OwnOptimizer() = default;

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (!group.has_options()) return torch::optim::Optimizer::add_param_group(group);
  const auto* const options = dynamic_cast<const Options*>(&group.options());
  TORCH_CHECK(options, Derived::name, ": the options of a group must be ", Derived::name,
              "Options, got those of another optimizer");
  Derived::check(*options);
  torch::optim::Optimizer::add_param_group(group);
  this->param_groups().back().set_options(std::make_unique<Options>(*options));
}

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::save(torch::serialize::OutputArchive& archive) const {
  this->sync_step_count();
  make_dense(*this);
  torch::optim::serialize<State, Options>(archive, *this);
  this->save_rounding(archive);
}

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::load(torch::serialize::InputArchive& archive) {
  this->sync_step_count();
  torch::optim::serialize<State, Options>(archive, static_cast<torch::optim::Optimizer&>(*this));
  this->load_rounding(archive);
}

template <class Derived, class Options, class State>
State OwnOptimizer<Derived, Options, State>::state_of(const at::Tensor& parameter) const {
  const State* const known = this->known_state(parameter);
  if (!known) return {};
  TORCH_CHECK(known->step() >= 0, Derived::name, ": the step count must be >= 0, got ", known->step());
  return *known;
}

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::keep(std::vector<std::pair<at::Tensor, State>> states) {
  for (auto& [parameter, state] : states)
    this->state_[parameter.unsafeGetTensorImpl()] = std::make_unique<State>(std::move(state));
}

}  // namespace gradaccum::detail

#ifdef GRADACCUM_COMPILED
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw8bit.hpp>

namespace gradaccum::detail {
template class OwnOptimizer<optim::Adafactor, optim::AdafactorOptions, optim::AdafactorParamState>;
template class OwnOptimizer<optim::Adam8bit, optim::Adam8bitOptions, optim::Adam8bitParamState>;
template class OwnOptimizer<optim::AdamW8bit, optim::AdamW8bitOptions, optim::Adam8bitParamState>;
}  // namespace gradaccum::detail
#endif

namespace gradaccum::detail {

/// Returns the dimensions by descending stride; undefined for row-major, sparse and undefined tensors.
GRADACCUM_INLINE at::Tensor order_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_sparse() || tensor.is_contiguous()) return {};
  std::vector<std::int64_t> dimensions(static_cast<std::size_t>(tensor.dim()));
  std::iota(dimensions.begin(), dimensions.end(), std::int64_t{0});
  std::stable_sort(dimensions.begin(), dimensions.end(),
                   [&](auto a, auto b) { return tensor.stride(a) > tensor.stride(b); });
  return at::tensor(dimensions, at::kLong);
}

GRADACCUM_INLINE std::vector<std::int64_t> dimensions_in(const at::Tensor& order) {
  const auto here = order.cpu().contiguous();
  const auto* const first = here.const_data_ptr<std::int64_t>();
  return {first, first + here.numel()};
}

/// Validates an order that was read from a file.
GRADACCUM_INLINE void check_order(const at::Tensor& order, std::int64_t dimensions) {
  if (!order.defined()) return;
  const bool is_list = order.scalar_type() == at::kLong && order.dim() == 1 && order.numel() == dimensions;
  auto sorted = is_list ? dimensions_in(order) : std::vector<std::int64_t>();
  std::sort(sorted.begin(), sorted.end());
  bool each_once = is_list;
  for (std::size_t i = 0; i < sorted.size(); ++i) each_once = each_once && sorted[i] == static_cast<std::int64_t>(i);
  TORCH_CHECK(each_once, "optimizer state: order must have the dimensions of its parameter, each once");
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> Adam8bitParamState::clone() const {
  return std::make_unique<Adam8bitParamState>(*this);
}

GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> Adam8bitParamState::tensors() {
  return {{"exp_avg", &exp_avg},
          {"exp_avg_sq", &exp_avg_sq},
          {"exp_avg_scale", &exp_avg_scale},
          {"exp_avg_sq_scale", &exp_avg_sq_scale},
          {"order", &order}};
}

GRADACCUM_INLINE void Adam8bitParamState::restore_order() {
  if (!order.defined() || !coded()) return;
  detail::check_order(order, exp_avg.dim());
  const auto dimensions = detail::dimensions_in(order);
  auto back = dimensions;
  for (std::size_t i = 0; i < back.size(); ++i)
    back[static_cast<std::size_t>(dimensions[i])] = static_cast<std::int64_t>(i);
  for (auto* const codes : {&exp_avg, &exp_avg_sq})
    if (codes->is_contiguous()) *codes = codes->permute(dimensions).contiguous().permute(back);
}

GRADACCUM_INLINE void Adam8bitParamState::check(const at::Tensor& parameter) const {
  detail::check_order(order, parameter.dim());
  if (coded()) {
    detail::checked_state({exp_avg, exp_avg_scale}, parameter, true, "exp_avg");
    detail::checked_state({exp_avg_sq, exp_avg_sq_scale}, parameter, false, "exp_avg_sq");
  } else {
    detail::checked_state(exp_avg, parameter, "exp_avg");
    detail::checked_state(exp_avg_sq, parameter, "exp_avg_sq");
  }
  TORCH_CHECK(exp_avg.defined() && exp_avg_sq.defined(), "optimizer state: exp_avg and exp_avg_sq must both be there");
}

}  // namespace gradaccum::optim

namespace gradaccum::detail {

/// The steps of tensors with 8-bit and with float moments, and the states to keep once the steps are taken.
struct Adam8bitSteps {
  void add(const at::Tensor& parameter, const at::Tensor& gradient, const AdamSettings& settings,
           optim::Adam8bitParamState state, bool is_coded, const Multiplier& multiplier);

  std::vector<AdamStep> whole;
  std::vector<Adam8bitStep> coded;
  std::vector<std::pair<at::Tensor, optim::Adam8bitParamState>> states;
};

GRADACCUM_INLINE void Adam8bitSteps::add(const at::Tensor& parameter, const at::Tensor& gradient,
                                         const AdamSettings& settings, optim::Adam8bitParamState state, bool is_coded,
                                         const Multiplier& multiplier) {
  if (is_coded) {
    const auto& step =
        coded.emplace_back(adam8bit_step_of(settings, parameter, gradient, {state.exp_avg, state.exp_avg_scale},
                                            {state.exp_avg_sq, state.exp_avg_sq_scale}, multiplier));
    state.exp_avg = kept_moments(step, step.exp_avg.codes);
    state.exp_avg_scale = kept_moments(step, step.exp_avg.scales);
    state.exp_avg_sq = kept_moments(step, step.exp_avg_sq.codes);
    state.exp_avg_sq_scale = kept_moments(step, step.exp_avg_sq.scales);
    state.order = order_of(state.exp_avg);
  } else {
    const auto& step = whole.emplace_back(
        adam_step_of(settings, parameter, gradient, state.exp_avg, state.exp_avg_sq, at::Tensor(), multiplier));
    state.exp_avg = kept_moments(step, step.exp_avg);
    state.exp_avg_sq = kept_moments(step, step.exp_avg_sq);
  }
  state.step(settings.step);
  states.emplace_back(parameter, std::move(state));
}

template <class Derived, class Options>
Adam8bitOptimizer<Derived, Options>::~Adam8bitOptimizer() = default;

template <class Derived, class Options>
void Adam8bitOptimizer<Derived, Options>::check(const Options& options) {
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK(options.lr() >= 0, Derived::name, ": lr must be >= 0, got ", options.lr());
  TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, Derived::name, ": betas must be in [0, 1), got ",
              beta1, " and ", beta2);
  TORCH_CHECK(options.eps() >= 0, Derived::name, ": eps must be >= 0, got ", options.eps());
  TORCH_CHECK(options.weight_decay() >= 0, Derived::name, ": weight_decay must be >= 0, got ", options.weight_decay());
  TORCH_CHECK(!options.amsgrad(), Derived::name, ": there is no amsgrad with moments of 8 bits");
}

template <class Derived, class Options>
void Adam8bitOptimizer<Derived, Options>::move_blocks(const GradientOf& gradient_of, const Multiplier& multiplier,
                                                      bool decoupled) {
  Adam8bitSteps steps;
  for (auto& group : this->param_groups()) {
    const Options& options = this->options_of(group);
    Derived::check(options);
    for (auto& parameter : group.params())
      if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined()) {
        check_can_be_stepped(Derived::name, parameter, gradient);
        auto state = this->state_of(parameter);
        state.restore_order();
        const auto dtype = parameter.scalar_type();
        const bool known = state.exp_avg.defined() || state.exp_avg_sq.defined();
        const bool can_be_coded = parameter.numel() >= smallest_coded &&
                                  (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
        const bool coded = known ? state.coded() : can_be_coded;
        const auto settings = settings_of(options, decoupled, state.step() + 1);
        steps.add(parameter, gradient, settings, std::move(state), coded, multiplier);
      }
  }
  StepPlan moves;
  this->run_steps(moves, multiplier, steps.whole, steps.coded);
  this->keep(std::move(steps.states));
}

}  // namespace gradaccum::detail

#ifdef GRADACCUM_COMPILED
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw8bit.hpp>

namespace gradaccum::detail {
template class Adam8bitOptimizer<optim::Adam8bit, optim::Adam8bitOptions>;
template class Adam8bitOptimizer<optim::AdamW8bit, optim::AdamW8bitOptions>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
