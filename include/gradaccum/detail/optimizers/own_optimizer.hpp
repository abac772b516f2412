// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gradaccum::detail {

class GradientOf;
class StepPlan;
template <class Step>
struct StepsOnCpu;
struct Multiplier;

/// The common base of our optimizers, beside `torch::optim::Optimizer`.
class OnePass : public TakesGradients, public NamesItsState {
 public:
  void step(Gradients gradients) override;
  /// Returns true if all parameters are on devices, and the host has not judged the gradients.
  bool judges_on_device(const Gradients& gradients) const override;

  /// Rounds bfloat16 parameters up or down at random from now on, the nearer number the more often. The mean of many
  /// steps is then exact, where rounding to nearest would lose all small steps. A seed gives the same bits for any
  /// number of threads. Other parameters are not affected.
  void stochastic_rounding(std::uint64_t seed) { rounding_.seed(seed); }

  /// The state by the parameters' names, `exp_avg.0.weight`, for any file format. The tensors are the optimizer's own,
  /// or dense copies if it keeps rows.
  NamedTensors named_state(const NamedParameters& parameters) const override;

  /// Replaces the state by what `named_state` returned, in this program or another; tensors are copied. Parameters
  /// without an entry begin afresh. An unknown name, or another shape, is an error that changes nothing.
  void load_named_state(const NamedParameters& parameters, NamedTensors state);
  std::function<void()> take_named_state(const NamedParameters& parameters, NamedTensors state, bool lenient) override;

 protected:
  /// Steps with the parameters' own gradients.
  at::Tensor step_after(const torch::optim::Optimizer::LossClosure& closure);
  /// Takes steps that have all been checked, after those that `moves` has already.
  template <class... Step>
  void run_steps(StepPlan& moves, const Multiplier& multiplier, std::vector<Step>&... steps) {
    auto rounding = rounding_;  // counts random numbers, and is kept once nothing can fail any more
    (set_rounding_keys(steps, rounding), ...);
    const std::tuple<StepsOnCpu<Step>...> on_cpu{add_steps(moves, steps, multiplier)...};
    run(moves, std::move(rounding));
    (step_on_cpu(std::get<StepsOnCpu<Step>>(on_cpu).steps(), std::get<StepsOnCpu<Step>>(on_cpu).multiplier), ...);
  }
  bool rounds(const at::Tensor& parameter) const { return rounding_.concerns(parameter); }
  bool rounds_any() const { return rounding_.is_on(); }
  /// Takes the steps that the device skipped out of the counts. Waits for the device if steps have been left to it.
  void sync_step_count() const;
  void save_rounding(torch::serialize::OutputArchive& archive) const;
  void load_rounding(torch::serialize::InputArchive& archive);

 private:
  virtual torch::optim::Optimizer& itself() = 0;
  const torch::optim::Optimizer& itself() const { return const_cast<OnePass&>(*this).itself(); }
  virtual const char* class_name() const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> new_state() const = 0;
  /// Returns true if the state counts steps.
  virtual bool counts_steps() const = 0;
  /// Subtracts `steps` skipped steps from the parameter's count.
  virtual void uncount(const at::Tensor& parameter, std::int64_t steps) = 0;
  /// Steps all parameters that have a gradient.
  virtual void move(const GradientOf& gradient_of, const Multiplier& multiplier) = 0;
  void run(StepPlan& moves, StochasticRounding rounding);
  template <class Step>
  void set_rounding_keys(std::vector<Step>& steps, StochasticRounding& rounding) {
    for (auto& step : steps)
      if (rounding.concerns(step.parameter)) step.rounding_key = rounding.next_key(distinct_.place_of(step.parameter));
  }
  void check_distinct() { distinct_.check(class_name(), itself().param_groups()); }
  void move_unless_overflowed(const GradientOf& gradient_of, Gradients gradients);

  DistinctParameters distinct_;
  StochasticRounding rounding_;
  mutable at::Tensor skipped_steps_;           // the number of skipped steps, known on the device alone
  mutable std::vector<at::Tensor> concerned_;  // the parameters of those steps
};

/// LibTorch's optimizer `Base` with our own step: `Derived` has a `name`, and overrides `move`. Options, state, groups,
/// saving and loading are LibTorch's.
template <class Derived, class Base, class State>
class OnePassOptimizer : public Base, public OnePass {
 public:
  using Base::Base;
  OnePassOptimizer(OnePassOptimizer&&) = default;
  OnePassOptimizer& operator=(OnePassOptimizer&&) = default;
  ~OnePassOptimizer() override;

  using OnePass::step;
  /// Returns false with stochastic rounding, which counts random numbers from a parameter's first element, and for
  /// derived classes, which may look at whole parameters.
  bool steps_by_elements() const override;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// LibTorch's state. Through a `torch::optim::Optimizer&` its counts may include steps that a device has skipped.
  auto& state() { return sync_step_count(), Base::state(); }
  const auto& state() const { return sync_step_count(), Base::state(); }

 protected:
  using ParamState = State;

  /// Finds the state of a parameter; nullptr if there is none.
  const ParamState* known_state(const at::Tensor& parameter) const;
  /// Finds the state of a parameter, or makes one.
  ParamState& kept_state(const at::Tensor& parameter);

 private:
  torch::optim::Optimizer& itself() override;
  const char* class_name() const override;
  std::unique_ptr<torch::optim::OptimizerParamState> new_state() const override;
  bool counts_steps() const override;
  void uncount(const at::Tensor& parameter, std::int64_t steps) override;
};

/// An optimizer that LibTorch lacks. `Derived` has `name` and `static void check(const Options&)`, and overrides
/// `move`.
template <class Derived, class Options, class State>
class OwnOptimizer : public OnePassOptimizer<Derived, torch::optim::Optimizer, State> {
 public:
  explicit OwnOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = {});
  explicit OwnOptimizer(std::vector<at::Tensor> parameters, Options defaults = {});
  OwnOptimizer(OwnOptimizer&&) = default;
  OwnOptimizer& operator=(OwnOptimizer&&) = default;
  ~OwnOptimizer() override;

  /// Adds a group and keeps all its options. LibTorch's function replaces options of a type that it does not know.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  static const Options& options_of(const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options());
  }
  /// Returns a copy of the parameter's state, or a new state.
  State state_of(const at::Tensor& parameter) const;
  /// Stores the states of parameters whose steps have been taken.
  void keep(std::vector<std::pair<at::Tensor, State>> states);
};

/// The code that Adam and AdamW share. They differ in their options and states, and in applying the weight decay.

template <class Options>
AdamSettings settings_of(const Options& options, bool decoupled, std::int64_t step) {
  const auto [beta1, beta2] = options.betas();
  return {options.lr(), beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad(), decoupled, step};
}

/// Prepares a step after checking its tensors. `known` is the parameter's state, nullptr before its first step.
template <class Options, class ParamState>
AdamStep adam_step_of(const char* optimizer, const at::Tensor& parameter, const at::Tensor& gradient,
                      const Options& options, bool decoupled, const ParamState* known, const Multiplier& multiplier) {
  check_can_be_stepped(optimizer, parameter, gradient);
  const ParamState none;
  const ParamState& state = known ? *known : none;
  TORCH_CHECK(state.step() >= 0, optimizer, ": the step count must be >= 0, got ", state.step());
  const auto settings = settings_of(options, decoupled, state.step() + 1);
  return adam_step_of(settings, parameter, gradient, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(),
                      multiplier);
}

template <class ParamState>
void keep_state(const AdamStep& step, ParamState& state) {
  state.exp_avg(kept_moments(step, step.exp_avg));
  state.exp_avg_sq(kept_moments(step, step.exp_avg_sq));
  state.max_exp_avg_sq(step.settings.amsgrad ? kept_moments(step, step.max_exp_avg_sq) : step.max_exp_avg_sq);
  state.step(step.settings.step);
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

/// The moments of one parameter: 8-bit codes with their scales, or float tensors if the parameter is small.
class Adam8bitParamState : public detail::OwnParamState {
 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  std::vector<std::pair<std::string, at::Tensor*>> tensors() override;
  void check(const at::Tensor& parameter) const override;
  bool coded() const { return exp_avg.defined() && exp_avg.scalar_type() == at::kByte; }
  /// Restores the memory order of codes from a file. Files are row-major, but scales belong to blocks in memory order.
  void restore_order();

  at::Tensor exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  at::Tensor order;  ///< the codes' dimensions by descending stride; undefined if they are row-major
};

}  // namespace gradaccum::optim

namespace gradaccum::detail {

/// The base of Adam8bit and AdamW8bit, which differ only in how they apply the weight decay.
template <class Derived, class Options>
class Adam8bitOptimizer : public OwnOptimizer<Derived, Options, optim::Adam8bitParamState> {
 public:
  using Adam8bitOptimizer::OwnOptimizer::OwnOptimizer;
  Adam8bitOptimizer(Adam8bitOptimizer&&) = default;
  Adam8bitOptimizer& operator=(Adam8bitOptimizer&&) = default;
  ~Adam8bitOptimizer() override;

  /// The least size for 8-bit moments, which also need float32, bfloat16 or float16. Other tensors keep float moments.
  static constexpr std::int64_t smallest_coded = 4096;

  static void check(const Options& options);

 protected:
  void move_blocks(const GradientOf& gradient_of, const Multiplier& multiplier, bool decoupled);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/own_optimizer.ipp>
#endif
