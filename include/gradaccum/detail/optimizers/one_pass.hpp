// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {
class GradientOf;
class StepPlan;
struct Multiplier;
std::function<void()> prepare_state_of(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                                       NamedTensors tensors, bool lenient);
}  // namespace gradaccum::detail

namespace gradaccum::optim {

/// The functions that this library's optimizers add to `torch::optim::Optimizer`.
///
///     ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(1e-3));
///     adamw.stochastic_rounding(1);
///     torch::mse_loss(model->forward(x), y).backward();
///     adamw.step(ga::Gradients(model->parameters()));
class OnePass : public TakesGradients {
 public:
  /// Steps with a window's gradients, and applies their factor in the same pass.
  GRADACCUM_INLINE void step(Gradients gradients) override;
  /// Returns true if all parameters are on devices, and the host has not judged the gradients.
  GRADACCUM_INLINE bool judges_on_device(const Gradients& gradients) const override;

  /// Rounds bfloat16 parameters up or down at random from the next step on, so that the mean of many steps is exact;
  /// rounding to nearest would lose small steps. Results depend on the seed, but not on the number of threads.
  void stochastic_rounding(std::uint64_t seed) { rounding_seed_ = seed; }

  /// Returns the state by the parameters' names, as in `exp_avg.0.weight`, for any file format. The tensors are the
  /// optimizer's own, or dense copies if it keeps rows.
  virtual std::map<std::string, at::Tensor> named_state(
      const torch::OrderedDict<std::string, at::Tensor>& parameters) const = 0;

  /// Replaces the state by a copy of a result of `named_state`. Parameters without an entry lose their state. Throws
  /// for an unknown name or another shape, and has changed nothing then.
  void load_named_state(const torch::OrderedDict<std::string, at::Tensor>& parameters,
                        std::map<std::string, at::Tensor> state) {
    take_named_state(parameters, std::move(state), /*lenient=*/false)();
  }

 protected:
  /// Checks and copies a result of `named_state`. Returns a function that installs it. Both are virtual, so that
  /// programs with other optimizers only can archive them without this library's definitions.
  virtual std::function<void()> take_named_state(const detail::NamedParameters& parameters, detail::NamedTensors state,
                                                 bool lenient) = 0;
  /// Steps with the parameters' own gradients.
  at::Tensor step_after(const torch::optim::Optimizer::LossClosure& closure);
  /// Runs steps that have been checked, after the steps that `plan` already has.
  template <class... Step>
  void run_steps(detail::StepPlan plan, const detail::Multiplier& multiplier, std::vector<Step>&... steps);
  bool rounds_any() const { return rounding_seed_.has_value(); }
  bool rounds(const at::Tensor& parameter) const { return rounds_any() && parameter.scalar_type() == at::kBFloat16; }
  /// Removes the steps that the device skipped from the counts. Synchronizes if it may have skipped any.
  void sync_step_count() const;
  void set_rounded_steps(std::vector<std::int64_t> steps);

  std::vector<std::int64_t> rounded_steps_;  // steps with random numbers, per parameter

 private:
  friend std::function<void()> detail::prepare_state_of(torch::optim::Optimizer& optimizer,
                                                        const detail::NamedParameters& parameters,
                                                        detail::NamedTensors tensors, bool lenient);

  virtual torch::optim::Optimizer& itself() = 0;
  const torch::optim::Optimizer& itself() const { return const_cast<OnePass&>(*this).itself(); }
  virtual const char* class_name() const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> new_state() const = 0;
  /// Returns true if the state counts steps.
  virtual bool counts_steps() const = 0;
  /// Steps all parameters that have a gradient.
  virtual void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) = 0;

  void check_distinct();
  template <class Step>
  void set_rounding_keys(std::vector<Step>& steps, std::vector<std::int64_t>& rounded_steps) const;

  std::vector<const void*> distinct_;                     // the parameters, which were checked to be distinct
  std::unordered_map<const void*, std::size_t> indices_;  // each parameter's index, counted across the groups
  std::optional<std::uint64_t> rounding_seed_;            // set by the program, and not a part of the state
  mutable at::Tensor skipped_steps_;                      // the number of skipped steps, known on the device only
  mutable std::vector<at::Tensor> concerned_;             // the parameters of those steps
};

/// LibTorch's optimizer `Base` with another step: `Derived` has a `name`, and overrides `move`.
template <class Derived, class Base, class State>
class OnePassOptimizer : public Base, public OnePass {
 public:
  using Base::Base;

  using OnePass::step;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override { return step_after(closure); }
  /// Returns false with stochastic rounding, which counts random numbers from a parameter's first element, and for
  /// derived classes, which may look at whole parameters.
  bool steps_by_elements() const override { return typeid(*this) == typeid(Derived) && !rounds_any(); }

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  std::map<std::string, at::Tensor> named_state(
      const torch::OrderedDict<std::string, at::Tensor>& parameters) const override {
    return OnePass::named_state(parameters);
  }

  /// Returns LibTorch's state. Through a `torch::optim::Optimizer&` its counts may include steps that a device skipped.
  auto& state() { return sync_step_count(), Base::state(); }
  const auto& state() const { return sync_step_count(), Base::state(); }

 protected:
  using States = std::vector<std::pair<at::Tensor, State>>;

  /// Finds the state of a parameter; nullptr if there is none.
  const State* known_state(const at::Tensor& parameter) const {
    const auto known = this->state_.find(parameter.unsafeGetTensorImpl());
    return known == this->state_.end() ? nullptr : static_cast<const State*>(known->second.get());
  }
  /// Calls `prepare(options, parameter, gradient, state)` for each parameter that has a gradient. `prepare` changes
  /// copies of the states, which are returned for `set_states` after the steps.
  template <class Options, class Prepare>
  States states_after(const detail::GradientOf& gradient_of, const Prepare& prepare);
  void set_states(States states);
  /// Runs the step of Adam or AdamW.
  template <class Options>
  void move_as_adam(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier);

 private:
  std::function<void()> take_named_state(const detail::NamedParameters& parameters, detail::NamedTensors state,
                                         bool lenient) override {
    return OnePass::take_named_state(parameters, std::move(state), lenient);
  }
  torch::optim::Optimizer& itself() override { return *this; }
  const char* class_name() const override { return Derived::name; }
  std::unique_ptr<torch::optim::OptimizerParamState> new_state() const override { return std::make_unique<State>(); }
  bool counts_steps() const override {
    return requires(State & state) { state.step(state.step()); };
  }
};

/// A parameter's state in an optimizer that LibTorch lacks: a step count and named tensors, undefined if absent.
class OwnParamState : public torch::optim::OptimizerParamState {
  TORCH_ARG(std::int64_t, step) = 0;

 public:
  virtual std::vector<std::pair<std::string, at::Tensor*>> tensors() = 0;
  /// Throws if the state does not fit the parameter.
  virtual void check(const at::Tensor& parameter) const = 0;

  GRADACCUM_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void serialize(torch::serialize::InputArchive& archive) override;
};

/// The groups and files of an optimizer that LibTorch lacks. `Derived` has `name` and `check(const Options&)`.
template <class Derived, class Options, class State>
class OwnGroups : public torch::optim::Optimizer {
 public:
  explicit OwnGroups(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = {});
  explicit OwnGroups(std::vector<at::Tensor> parameters, Options defaults = {})
      : OwnGroups({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

  /// Adds a group. As in LibTorch's optimizers, an option with its class's default value counts as not given, and takes
  /// the optimizer's value.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

/// An optimizer that LibTorch lacks.
template <class Derived, class Options, class State>
using OwnOptimizer = OnePassOptimizer<Derived, OwnGroups<Derived, Options, State>, State>;

/// The moments of one parameter: 8-bit codes with their scales, or float tensors if the parameter is small.
class Adam8bitParamState : public OwnParamState {
 public:
  GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> tensors() override;
  GRADACCUM_INLINE void check(const at::Tensor& parameter) const override;
  bool coded() const { return exp_avg.defined() && exp_avg.scalar_type() == at::kByte; }
  /// Restores the memory order of codes from a file. Files are row-major, but scales belong to blocks in memory order.
  void restore_order();

  at::Tensor exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  at::Tensor order;  ///< the codes' dimensions by descending stride; undefined if they are row-major
};

/// The base of Adam8bit and AdamW8bit, which differ only in how they apply the weight decay.
template <class Derived, class Options>
class Adam8bitOptimizer : public OwnOptimizer<Derived, Options, Adam8bitParamState> {
 public:
  using OwnOptimizer<Derived, Options, Adam8bitParamState>::OwnOptimizer;

  static void check(const Options& options);

  /// Keeps the moments of these parameters, for example of an embedding, in 32 bits. Call it before their first step.
  void keep_in_32_bits(const std::vector<at::Tensor>& parameters);

 private:
  void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
  /// Returns true for a parameter that was passed to `keep_in_32_bits`, and for a rank's piece of it if it is sharded.
  bool keeps_in_32_bits(const at::Tensor& parameter) const;

  std::vector<at::Tensor> in_32_bits_;  // set by the program, and not a part of the state
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
