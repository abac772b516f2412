// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/distinct_parameters.hpp>
#include <gradaccum/detail/optimizers/stochastic_rounding.hpp>
#include <gradaccum/detail/state/named_state.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace gradaccum::detail {

class GradientOf;
class Moves;
template <class Step>
struct StepsOnCpu;
struct Multiplier;

/// The common base of our optimizers, beside `torch::optim::Optimizer`.
class OnePass : public TakesGradients, public NamesItsState {
 public:
  GRADACCUM_INLINE void step(Gradients gradients) override;
  /// Returns true if all parameters are on devices, and the host has not judged the gradients.
  GRADACCUM_INLINE bool judges_on_device(const Gradients& gradients) const override;

  /// Rounds bfloat16 parameters up or down at random from now on, the nearer number the more often. The mean of many
  /// steps is then exact, where rounding to nearest would lose all small steps. A seed gives the same bits for any
  /// number of threads. Other parameters are not affected.
  void stochastic_rounding(std::uint64_t seed) { rounding_.seed(seed); }

  /// The state by the parameters' names, `exp_avg.0.weight`, for any file format. The tensors are the optimizer's own,
  /// or dense copies if it keeps rows.
  GRADACCUM_INLINE NamedTensors named_state(const NamedParameters& parameters) const override;

  /// Replaces the state by what `named_state` returned, in this program or another; tensors are copied. Parameters
  /// without an entry begin afresh. An unknown name, or another shape, is an error that changes nothing.
  void load_named_state(const NamedParameters& parameters, NamedTensors state);
  GRADACCUM_INLINE std::function<void()> take_named_state(const NamedParameters& parameters, NamedTensors state,
                                                          bool lenient) override;

 protected:
  /// Steps with the parameters' own gradients.
  at::Tensor step_after(const torch::optim::Optimizer::LossClosure& closure);
  /// Takes steps that have all been checked, after those that `moves` has already.
  template <class... Step>
  void take_steps(Moves& moves, const Multiplier& multiplier, std::vector<Step>&... steps) {
    auto rounding = rounding_;  // counts random numbers, and is kept once nothing can fail any more
    (set_rounding_keys(steps, rounding), ...);
    const std::tuple<StepsOnCpu<Step>...> on_cpu{add_steps(moves, steps, multiplier)...};
    run(moves, std::move(rounding));
    (take_on_cpu(std::get<StepsOnCpu<Step>>(on_cpu).steps(), std::get<StepsOnCpu<Step>>(on_cpu).multiplier), ...);
  }
  bool rounds(const at::Tensor& parameter) const { return rounding_.concerns(parameter); }
  bool rounds_any() const { return rounding_.is_on(); }
  /// Takes the steps that the device skipped out of the counts. Waits for the device if steps have been left to it.
  void settle() const;
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
  void run(Moves& moves, StochasticRounding rounding);
  template <class Step>
  void set_rounding_keys(std::vector<Step>& steps, StochasticRounding& rounding) {
    for (auto& step : steps)
      if (rounding.concerns(step.parameter)) step.rounding_key = rounding.next_key(distinct_.place_of(step.parameter));
  }
  void check_distinct() { distinct_.check(class_name(), itself().param_groups()); }
  void move_unless_overflowed(const GradientOf& gradient_of, Gradients gradients);

  DistinctParameters distinct_;
  StochasticRounding rounding_;
  mutable at::Tensor left_out_;                // the number of skipped steps, known on the device alone
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
  GRADACCUM_INLINE ~OnePassOptimizer() override;

  using OnePass::step;
  /// Returns false with stochastic rounding, which counts random numbers from a parameter's first element, and for
  /// derived classes, which may look at whole parameters.
  GRADACCUM_INLINE bool steps_by_elements() const override;
  GRADACCUM_INLINE at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;

  GRADACCUM_INLINE void save(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void load(torch::serialize::InputArchive& archive) override;

  /// LibTorch's state. Through a `torch::optim::Optimizer&` its counts may include steps that a device has skipped.
  auto& state() { return settle(), Base::state(); }
  const auto& state() const { return settle(), Base::state(); }

 protected:
  using ParamState = State;

  /// Finds the state of a parameter; nullptr if there is none.
  const ParamState* known_state(const at::Tensor& parameter) const;
  /// Finds the state of a parameter, or makes one.
  ParamState& kept_state(const at::Tensor& parameter);

 private:
  GRADACCUM_INLINE torch::optim::Optimizer& itself() override;
  GRADACCUM_INLINE const char* class_name() const override;
  GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> new_state() const override;
  GRADACCUM_INLINE bool counts_steps() const override;
  GRADACCUM_INLINE void uncount(const at::Tensor& parameter, std::int64_t steps) override;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/one_pass_optimizer.ipp>
#endif
