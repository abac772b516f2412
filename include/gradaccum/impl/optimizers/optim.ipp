// SPDX-License-Identifier: Apache-2.0
// Implements the optimizers of ga::optim: from a window's gradients to a step for each parameter.
#pragma once

#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include <gradaccum/archive.hpp>

#include <gradaccum/detail/optimizers/cpu_steps.hpp>
#include <gradaccum/detail/optimizers/device_steps.hpp>
#include <gradaccum/detail/optimizers/eight_bit_moments.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/optimizers/row_steps.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

inline constexpr const char *saved_rounding = "rounding_steps", *saved_rounding_of = "rounding_step.";

/// Finds the gradient of a parameter: its own, or the one in a window.
class GradientOf {
 public:
  GradientOf() = default;
  explicit GradientOf(const Gradients& gradients) : of_window_(true), raw_(gradients.raw()) {
    const auto parameters = gradients.parameters();
    for (std::size_t i = 0; i < raw_.size(); ++i) index_.emplace(parameters[i].unsafeGetTensorImpl(), i);
  }

  bool empty() const { return raw_.empty(); }  ///< true if a window has no gradients
  const at::Tensor& operator()(const at::Tensor& parameter) const {
    if (!of_window_) return parameter.grad();
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    return found == index_.end() ? none_ : raw_[found->second];
  }

 private:
  bool of_window_ = false;
  std::vector<at::Tensor> raw_;
  std::unordered_map<const void*, std::size_t> index_;
  at::Tensor none_;
};

/// Mixes a number's bits into all 64, as the SplitMix64 generator does.
GRADACCUM_INLINE std::uint64_t scattered(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Returns the settings of Adam's next step, or of AdamW's, whose options say that the weight decay is decoupled.
template <class Optimizer, class Options>
AdamSettings settings_of(const Options& options, std::int64_t steps) {
  constexpr bool decoupled = std::is_same_v<Options, torch::optim::AdamWOptions>;
  TORCH_CHECK(steps >= 0, Optimizer::name, ": the step count must be >= 0, got ", steps);
  const auto [beta1, beta2] = options.betas();
  return {options.lr(), beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad(), decoupled, steps + 1};
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
  std::vector<std::int64_t> all(static_cast<std::size_t>(dimensions));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  const bool is_list = order.scalar_type() == at::kLong && order.dim() == 1 && order.numel() == dimensions;
  const bool each_once = is_list && std::ranges::is_permutation(dimensions_in(order), all);
  TORCH_CHECK(each_once, "optimizer state: order must have the dimensions of its parameter, each once");
}

/// The least size for 8-bit moments, which also need float32, bfloat16 or float16. Other tensors keep float moments.
inline constexpr std::int64_t smallest_coded = 4096;

/// Calls `visit(name, tensor, shape)` for each state tensor that a step of the parameter needs.
template <class Visit>
void for_each_needed(optim::AdafactorParamState& state, const at::Tensor& parameter, bool momentum,
                     const Visit& visit) {
  if (parameter.dim() < 2) {
    visit("variance", state.variance(), parameter.sizes());
  } else {
    auto rows = parameter.sizes().vec(), columns = rows;
    rows.back() = columns[columns.size() - 2] = 1;
    visit("row_var", state.row_var(), at::IntArrayRef(rows));
    visit("col_var", state.col_var(), at::IntArrayRef(columns));
  }
  if (momentum) visit("exp_avg", state.exp_avg(), parameter.sizes());
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE at::Tensor OnePass::step_after(const torch::optim::Optimizer::LossClosure& closure) {
  const auto loss = detail::loss_of(closure);
  sync_step_count();
  at::NoGradGuard no_grad;
  check_distinct();
  move(detail::GradientOf(), {});
  return loss;
}

GRADACCUM_INLINE void OnePass::step(Gradients gradients) {
  const bool left_to_device = judges_on_device(gradients);
  if (!left_to_device && gradients.overflowed()) return;
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
    return move(gradient_of, by);
  }
  // Counts the step as if it were taken. `skipped_steps_` counts on the device the steps that were not.
  auto parameters = gradients.parameters();
  if (!detail::same_parameters(parameters, concerned_)) sync_step_count();
  by.found_inf = gradients.judge_on_device();
  check_distinct();
  if (!counts_steps()) return move(gradient_of, by);
  const auto device = by.found_inf.device();
  if (skipped_steps_.defined()) by.skipped_steps = skipped_steps_.to(device);
  auto skipped_steps = by.skipped_steps;
  if (!skipped_steps.defined()) {
    const c10::InferenceMode can_be_changed_after_it(false);
    skipped_steps = at::zeros({}, at::TensorOptions(at::kFloat).device(device));
  }
  move(gradient_of, by);
  skipped_steps_ = skipped_steps.add_(by.found_inf);
  concerned_ = std::move(parameters);
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

template <class... Step>
void OnePass::run_steps(detail::StepPlan plan, const detail::Multiplier& multiplier, std::vector<Step>&... steps) {
  auto rounded_steps = rounded_steps_;  // kept once nothing can fail any more
  (set_rounding_keys(steps, rounded_steps), ...);
  bool any_on_cpu = false;
  const auto plan_for_devices = [&](const auto& all) {
    const auto on_cpu = [](auto& step) { return step.parameter.is_cpu(); };
    if (std::ranges::none_of(all, on_cpu)) return plan_steps(plan, all, multiplier, class_name());
    any_on_cpu = true;
    std::remove_cvref_t<decltype(all)> on_devices;
    std::ranges::remove_copy_if(all, std::back_inserter(on_devices), on_cpu);
    if (!on_devices.empty()) plan_steps(plan, on_devices, multiplier, class_name());
  };
  (plan_for_devices(steps), ...);
  const double on_host = any_on_cpu ? detail::host_number(multiplier) : 1;
  plan.allocate();
  rounded_steps_ = std::move(rounded_steps);
  plan.run();  // first, since the processor's part may wait for devices
  if (any_on_cpu) (step_on_cpu(steps, on_host), ...);
  at::autocast::clear_cache();  // its casts are of the old parameters
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

template <class Derived, class Base, class State>
void OnePassOptimizer<Derived, Base, State>::save(torch::serialize::OutputArchive& archive) const {
  sync_step_count();
  detail::make_dense(*this);
  Base::save(archive);
  if (!rounded_steps_.empty()) archive.write(detail::saved_rounding, c10::IValue(rounded_steps_));
}

template <class Derived, class Base, class State>
void OnePassOptimizer<Derived, Base, State>::load(torch::serialize::InputArchive& archive) {
  sync_step_count();
  Base::load(archive);
  detail::make_dense(*this);  // LibTorch's SGD may have saved the sum of sparse gradients
  c10::IValue steps;
  set_rounded_steps(archive.try_read(detail::saved_rounding, steps) ? steps.toIntVector()
                                                                    : std::vector<std::int64_t>());
}

template <class Derived, class Base, class State>
template <class Options, class Prepare>
auto OnePassOptimizer<Derived, Base, State>::states_after(const detail::GradientOf& gradient_of, const Prepare& prepare)
    -> States {
  States states;
  for (auto& group : this->param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    if constexpr (requires { Derived::check(options); }) Derived::check(options);  // may have been changed or loaded
    for (auto& parameter : group.params()) {
      const at::Tensor& gradient = gradient_of(parameter);
      if (!gradient.defined()) continue;
      detail::check_can_be_stepped(Derived::name, parameter, gradient);
      const auto* const known = known_state(parameter);
      prepare(options, parameter, gradient, states.emplace_back(parameter, known ? *known : State()).second);
    }
  }
  return states;
}

template <class Derived, class Base, class State>
void OnePassOptimizer<Derived, Base, State>::set_states(States states) {
  for (auto& [parameter, state] : states) {
    auto& own = this->state_[parameter.unsafeGetTensorImpl()];
    if (!own) own = std::make_unique<State>();
    static_cast<State&>(*own) = std::move(state);
  }
}

template <class Derived, class Base, class State>
template <class Options>
void OnePassOptimizer<Derived, Base, State>::move_as_adam(const detail::GradientOf& gradient_of,
                                                          const detail::Multiplier& multiplier) {
  std::vector<detail::AdamStep> steps;
  auto states = states_after<Options>(gradient_of, [&](auto& options, auto& parameter, auto& gradient, State& state) {
    const auto settings = detail::settings_of<Derived>(options, state.step());
    const auto& step = steps.emplace_back(prepared(
        detail::AdamStep{settings, parameter, gradient, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()},
        multiplier));
    state.exp_avg(detail::state_tensor(step, step.exp_avg));
    state.exp_avg_sq(detail::state_tensor(step, step.exp_avg_sq));
    state.max_exp_avg_sq(settings.amsgrad ? detail::state_tensor(step, step.max_exp_avg_sq) : step.max_exp_avg_sq);
    state.step(settings.step);
  });
  run_steps({}, multiplier, steps);
  set_states(std::move(states));
}

template <class Derived, class Options, class State>
OwnGroups<Derived, Options, State>::OwnGroups(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                              Options defaults)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<Options>(defaults)) {
  Derived::check(defaults);
  for (auto& group : groups) add_param_group(group);
}

template <class Derived, class Options, class State>
void OwnGroups<Derived, Options, State>::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (!group.has_options()) return torch::optim::Optimizer::add_param_group(group);
  const auto* const options = dynamic_cast<const Options*>(&group.options());
  TORCH_CHECK(options, Derived::name, ": the options of a group must be ", Derived::name,
              "Options, got those of another optimizer");
  Derived::check(*options);
  torch::optim::Optimizer::add_param_group(group);
  if constexpr (std::derived_from<Options, detail::ArchivesItself>) {  // a class that LibTorch does not know
    auto& added = param_groups().back();
    const bool is_replaced = !(static_cast<const Options&>(added.options()) == *options);  // not by LibTorch 2.11
    if (is_replaced) added.set_options(std::make_unique<Options>(options->inherit(static_cast<Options&>(defaults()))));
  }
}

template <class Derived, class Options, class State>
void OwnGroups<Derived, Options, State>::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

template <class Derived, class Options, class State>
void OwnGroups<Derived, Options, State>::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, *this);
}

GRADACCUM_INLINE void Adam::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  move_as_adam<AdamOptions>(gradient_of, multiplier);
}

GRADACCUM_INLINE void AdamW::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  move_as_adam<AdamWOptions>(gradient_of, multiplier);
}

/// Returns false if dampening applies to a first momentum, which is undampened: the host must know if it exists.
GRADACCUM_INLINE bool SGD::judges_on_device(const Gradients& gradients) const {
  if (!OnePassOptimizer::judges_on_device(gradients)) return false;
  const detail::GradientOf gradient_of(gradients);
  bool first_is_other = false;
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const SGDOptions&>(group.options());
    if (options.momentum() == 0 || options.dampening() == 0) continue;
    for (auto& parameter : group.params()) {
      const auto* const known = known_state(parameter);
      first_is_other |= gradient_of(parameter).defined() && !(known && known->momentum_buffer().defined());
    }
  }
  return !first_is_other;
}

GRADACCUM_INLINE void SGD::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::SgdStep> steps;
  detail::StepPlan plan;
  auto states = states_after<SGDOptions>(gradient_of, [&](auto& options, auto& parameter, auto& gradient, auto& state) {
    const bool plain = options.momentum() == 0 && options.weight_decay() == 0 && !rounds(parameter);
    if (gradient.is_sparse() && plain && !parameter.is_cpu())
      return plan.add(detail::row_step_of(parameter, gradient, multiplier, options.lr()));
    const at::Tensor buffer = state.momentum_buffer();
    const detail::SgdSettings settings{options.lr(),           options.momentum(), options.dampening(),
                                       options.weight_decay(), options.nesterov(), /*first=*/!buffer.defined()};
    const auto& step = steps.emplace_back(prepared(detail::SgdStep{settings, parameter, gradient, buffer}, multiplier));
    if (settings.momentum != 0) state.momentum_buffer(detail::state_tensor(step, step.momentum_buffer));
  });
  run_steps(std::move(plan), multiplier, steps);
  std::erase_if(states, [](auto& of) { return !of.second.momentum_buffer().defined(); });
  set_states(std::move(states));
}

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
  TORCH_CHECK(exp_avg.defined() && exp_avg_sq.defined(), "optimizer state: exp_avg and exp_avg_sq must both exist");
}

template <class Derived, class Options>
void Adam8bitOptimizer<Derived, Options>::check(const Options& options) {
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK(options.lr() >= 0, Derived::name, ": lr must be >= 0, got ", options.lr());
  TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, Derived::name, ": betas must be in [0, 1), got ",
              beta1, " and ", beta2);
  TORCH_CHECK(options.eps() >= 0, Derived::name, ": eps must be >= 0, got ", options.eps());
  TORCH_CHECK(options.weight_decay() >= 0, Derived::name, ": weight_decay must be >= 0, got ", options.weight_decay());
  TORCH_CHECK(!options.amsgrad(), Derived::name, ": amsgrad must be false; 8-bit moments do not support it");
}

template <class Derived, class Options>
void Adam8bitOptimizer<Derived, Options>::keep_in_32_bits(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> own;
  for (auto& group : this->param_groups())
    for (auto& parameter : group.params()) own.insert(parameter.unsafeGetTensorImpl());
  for (auto& parameter : parameters) {
    TORCH_CHECK(own.contains(parameter.unsafeGetTensorImpl()), Derived::name,
                "::keep_in_32_bits: must be given parameters of this optimizer, got another tensor of shape ",
                parameter.sizes());
    const auto* const state = this->known_state(parameter);
    TORCH_CHECK(!state || !state->coded(), Derived::name,
                "::keep_in_32_bits: must be called before the first step and before a state is loaded, got a parameter "
                "of shape ",
                parameter.sizes(), " with 8-bit moments");
  }
  in_32_bits_.insert(in_32_bits_.end(), parameters.begin(), parameters.end());
}

template <class Derived, class Options>
bool Adam8bitOptimizer<Derived, Options>::keeps_in_32_bits(const at::Tensor& parameter) const {
  const auto* const begin = static_cast<const char*>(parameter.const_data_ptr());
  return std::ranges::any_of(in_32_bits_, [&](auto& named) {
    const auto* const first = static_cast<const char*>(named.const_data_ptr());
    return parameter.is_same(named) ||
           (parameter.device() == named.device() && first <= begin && begin < first + named.nbytes());
  });
}

template <class Derived, class Options>
void Adam8bitOptimizer<Derived, Options>::move(const detail::GradientOf& gradient_of,
                                               const detail::Multiplier& multiplier) {
  std::vector<detail::AdamStep> whole;
  std::vector<detail::Adam8bitStep> coded;
  using State = Adam8bitParamState;
  const auto prepare = [&](auto& options, const at::Tensor& parameter, const at::Tensor& gradient, State& state) {
    const auto settings = detail::settings_of<Derived>(options, state.step());
    state.restore_order();
    const auto dtype = parameter.scalar_type();
    const bool has_moments = state.exp_avg.defined() || state.exp_avg_sq.defined();
    const bool can_be_coded = parameter.numel() >= detail::smallest_coded && !keeps_in_32_bits(parameter) &&
                              (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
    if (has_moments ? state.coded() : can_be_coded) {
      const auto& step = coded.emplace_back(prepared(detail::Adam8bitStep{settings,
                                                                          parameter,
                                                                          gradient,
                                                                          {state.exp_avg, state.exp_avg_scale},
                                                                          {state.exp_avg_sq, state.exp_avg_sq_scale}},
                                                     multiplier));
      state.exp_avg = detail::state_tensor(step, step.exp_avg.codes);
      state.exp_avg_scale = detail::state_tensor(step, step.exp_avg.scales);
      state.exp_avg_sq = detail::state_tensor(step, step.exp_avg_sq.codes);
      state.exp_avg_sq_scale = detail::state_tensor(step, step.exp_avg_sq.scales);
      state.order = detail::order_of(state.exp_avg);
    } else {
      const auto& step = whole.emplace_back(
          prepared(detail::AdamStep{settings, parameter, gradient, state.exp_avg, state.exp_avg_sq, {}}, multiplier));
      state.exp_avg = detail::state_tensor(step, step.exp_avg);
      state.exp_avg_sq = detail::state_tensor(step, step.exp_avg_sq);
    }
    state.step(settings.step);
  };
  auto states = this->template states_after<Options>(gradient_of, prepare);
  this->run_steps({}, multiplier, whole, coded);
  this->set_states(std::move(states));
}

GRADACCUM_INLINE void AdafactorOptions::check() const {
  const auto [eps1, eps2] = eps();
  const auto not_negative = [](const char* what, double value) {
    TORCH_CHECK(value >= 0 && detail::is_finite(value), "Adafactor: ", what, " must be finite and >= 0, got ", value);
  };
  not_negative("lr", lr());
  not_negative("eps[0], of the squared gradient,", eps1);
  not_negative("eps[1], of the parameter's RMS,", eps2);
  not_negative("weight_decay", weight_decay());
  TORCH_CHECK(beta2_decay() <= 0 && detail::is_finite(beta2_decay()),
              "Adafactor: beta2_decay must be finite and <= 0, got ", beta2_decay());
  TORCH_CHECK(d() > 0, "Adafactor: d must be > 0, got ", d(), "; infinity switches clipping off");
  TORCH_CHECK(beta1() >= 0 && beta1() < 1, "Adafactor: beta1 must be in [0, 1), got ", beta1());
  TORCH_CHECK(relative_step() || !warmup_init(), "Adafactor: warmup_init must come with relative_step; set both");
  TORCH_CHECK(variant() == AdafactorVariant::paper || variant() == AdafactorVariant::pytorch,
              "Adafactor: variant must be AdafactorVariant::paper or pytorch, got ", static_cast<int>(variant()));
}

/// Calls `visit(name, value)` for each option but the variant.
template <class Visit>
void AdafactorOptions::for_each(const Visit& visit) {
  visit("lr", lr_);
  visit("beta2_decay", beta2_decay_);
  visit("eps", eps_);
  visit("d", d_);
  visit("weight_decay", weight_decay_);
  visit("beta1", beta1_);
  visit("relative_step", relative_step_);
  visit("warmup_init", warmup_init_);
  visit("scale_parameter", scale_parameter_);
}

GRADACCUM_INLINE void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  auto copy = *this;
  copy.for_each([&](const char* option, auto& value) { archive.write(option, c10::IValue(value)); });
  archive.write("variant", c10::IValue(static_cast<std::int64_t>(variant())));
}

GRADACCUM_INLINE void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue read;
  for_each([&](const char* option, auto& value) {
    archive.read(option, read);
    value = read.to<std::remove_cvref_t<decltype(value)>>();
  });
  archive.read("variant", read);
  TORCH_CHECK(read.toInt() == 0 || read.toInt() == 1, "Adafactor: a file's variant must be 0 or 1, got ", read.toInt());
  variant(static_cast<AdafactorVariant>(read.toInt()));
  check();
}

GRADACCUM_INLINE void AdafactorOptions::state(Archive& archive) {
  for_each([&](const std::string& option, auto& value) {
    if constexpr (std::is_same_v<decltype(value), eps_t&>) {
      archive("eps1", std::get<0>(value));
      archive("eps2", std::get<1>(value));
    } else {
      archive(option, value);
    }
  });
  auto number = static_cast<std::int64_t>(variant());
  archive("variant", number);
  variant_ = static_cast<AdafactorVariant>(number);
  check();
}

auto AdafactorOptions::all(auto& of) {
  return std::tie(of.lr_, of.beta2_decay_, of.eps_, of.d_, of.weight_decay_, of.beta1_, of.relative_step_,
                  of.warmup_init_, of.scale_parameter_, of.variant_);
}

GRADACCUM_INLINE bool operator==(const AdafactorOptions& a, const AdafactorOptions& b) {
  return AdafactorOptions::all(a) == AdafactorOptions::all(b);
}

GRADACCUM_INLINE AdafactorOptions AdafactorOptions::inherit(const AdafactorOptions& from) const {
  auto options = *this;
  const AdafactorOptions not_given;
  const auto take = [](auto& option, const auto& default_value, const auto& of_optimizer) {
    if (option == default_value) option = of_optimizer;
  };
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    (take(std::get<i>(all(options)), std::get<i>(all(not_given)), std::get<i>(all(from))), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<decltype(all(options))>>());
  if (!options.relative_step()) options.warmup_init(false);  // such a group cannot have it
  return options;
}

GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> AdafactorParamState::clone() const {
  return std::make_unique<AdafactorParamState>(*this);
}

GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> AdafactorParamState::tensors() {
  return {{"row_var", &row_var_}, {"col_var", &col_var_}, {"variance", &variance_}, {"exp_avg", &exp_avg_}};
}

GRADACCUM_INLINE void AdafactorParamState::check(const at::Tensor& parameter) const {
  TORCH_CHECK(step() >= 0 && step() < std::int64_t{1} << 53, "Adafactor: the step count must be >= 0, got ", step());
  auto copy = *this;  // copies handles: unneeded tensors remain in `copy`
  detail::for_each_needed(
      copy, parameter, /*momentum=*/true, [&](const char* slot, at::Tensor& state, at::IntArrayRef shape) {
        TORCH_CHECK(
            !state.defined() || (state.layout() == at::kStrided && state.sizes() == shape &&
                                 state.device() == parameter.device() && at::isFloatingType(state.scalar_type())),
            "Adafactor: state: ", slot, " must be floating, of shape ", shape, " on ", parameter.device(), ", got ",
            state.sizes(), " on ", state.device(), " (", state.scalar_type(),
            "); the state was loaded for another model");
        TORCH_CHECK(state.defined() || step() == 0 || &state == &copy.exp_avg_, "Adafactor: state: ", slot, " of step ",
                    step(), " must be defined, for a parameter of shape ", parameter.sizes(), ", got none");
        state.reset();
      });
  for (auto& [slot, tensor] : copy.tensors())
    TORCH_CHECK(!tensor->defined(), "Adafactor: state: a parameter of shape ", parameter.sizes(), " has no ", slot,
                ", got one of ", tensor->sizes(), "; the state was loaded for another model");
}

GRADACCUM_INLINE void AdafactorParamState::prepare(const at::Tensor& parameter, bool momentum) {
  const auto type = detail::state_type(parameter);
  detail::for_each_needed(*this, parameter, momentum, [&](const char*, at::Tensor& state, at::IntArrayRef shape) {
    state = state.defined() ? detail::row_major(state, type) : at::zeros(shape, parameter.options().dtype(type));
  });
}

GRADACCUM_INLINE void Adafactor::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::AdafactorStep> steps;
  auto states = states_after<AdafactorOptions>(gradient_of, [&](auto& options, auto& parameter, auto& gradient,
                                                                auto& state) {
    TORCH_CHECK(!parameter.is_complex(), "Adafactor: a parameter must be real, got ", parameter.scalar_type());
    TORCH_CHECK(!gradient.is_sparse(),
                "Adafactor: a gradient must be dense, got a sparse one for a parameter of shape ", parameter.sizes(),
                "; use AdamW, or an embedding that is not sparse");
    const bool has_momentum = options.beta1() != 0;
    state.check(parameter);
    state.prepare(parameter, has_momentum);
    state.step(state.step() + 1);
    const auto [eps1, eps2] = options.eps();
    const detail::AdafactorSettings settings{.lr = options.lr(),
                                             .step_size = 0,
                                             .fresh2 = 0,
                                             .eps1 = eps1,
                                             .eps2 = eps2,
                                             .d = options.d(),
                                             .weight_decay = options.weight_decay(),
                                             .beta1 = options.beta1(),
                                             .scale_parameter = options.scale_parameter(),
                                             .pytorch = options.variant() == AdafactorVariant::pytorch,
                                             .beta2_decay = options.beta2_decay(),
                                             .relative_step = options.relative_step(),
                                             .warmup_init = options.warmup_init()};
    steps.push_back({detail::at_step(settings, static_cast<double>(state.step())), parameter, gradient, state.row_var(),
                     state.col_var(), state.variance(), has_momentum ? state.exp_avg() : at::Tensor()});
  });
  run_steps({}, multiplier, steps);
  set_states(std::move(states));
}

#ifdef GRADACCUM_COMPILED
template class OnePassOptimizer<SGD, torch::optim::SGD, torch::optim::SGDParamState>;
template class OnePassOptimizer<Adam, torch::optim::Adam, torch::optim::AdamParamState>;
template class OnePassOptimizer<AdamW, torch::optim::AdamW, torch::optim::AdamWParamState>;
template class OwnGroups<Adam8bit, Adam8bitOptions, Adam8bitParamState>;
template class OwnGroups<AdamW8bit, AdamW8bitOptions, Adam8bitParamState>;
template class OwnGroups<Adafactor, AdafactorOptions, AdafactorParamState>;
template class OnePassOptimizer<Adam8bit, OwnGroups<Adam8bit, Adam8bitOptions, Adam8bitParamState>, Adam8bitParamState>;
template class OnePassOptimizer<AdamW8bit, OwnGroups<AdamW8bit, AdamW8bitOptions, Adam8bitParamState>,
                                Adam8bitParamState>;
template class OnePassOptimizer<Adafactor, OwnGroups<Adafactor, AdafactorOptions, AdafactorParamState>,
                                AdafactorParamState>;
template class Adam8bitOptimizer<Adam8bit, Adam8bitOptions>;
template class Adam8bitOptimizer<AdamW8bit, AdamW8bitOptions>;
#endif

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
