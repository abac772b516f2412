// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <array>
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
/// Finds the gradient of a parameter: its own, or the one in a window.
class GradientOf {
 public:
  GradientOf() = default;
  explicit GradientOf(const Gradients& gradients) : of_window_(true) {
    const auto parameters = gradients.parameters(), raw = gradients.raw();
    for (std::size_t i = 0; i < raw.size(); ++i) all_.emplace(parameters[i].unsafeGetTensorImpl(), raw[i]);
  }

  bool empty() const { return all_.empty(); }  ///< true if a window has no gradients
  const at::Tensor& operator()(const at::Tensor& parameter) const {
    if (!of_window_) return parameter.grad();
    const auto found = all_.find(parameter.unsafeGetTensorImpl());
    return found == all_.end() ? none_ : found->second;
  }

 private:
  bool of_window_ = false;
  std::unordered_map<const void*, at::Tensor> all_;  // the window's gradients by their parameters
  at::Tensor none_;
};

/// The tensors of a parameter's state in the order of its step, and its count of steps, if it has one.
struct StateParts {
  std::array<at::Tensor*, most_states> tensors{};
  std::int64_t* step = nullptr;
};
inline StateParts parts_of_torch(torch::optim::SGDParamState& of) { return {{&of.momentum_buffer()}}; }
template <class AdamState>
StateParts parts_of_torch(AdamState& of) {
  return {{&of.exp_avg(), &of.exp_avg_sq(), &of.max_exp_avg_sq()}, &of.step()};
}

std::function<void()> prepare_state_of(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                                       NamedTensors tensors, bool lenient);

/// A step that was checked and has its memory: a function to call once.
using PreparedStep = std::function<void()>;

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
  GRADACCUM_INLINE std::function<void()> prepare(Gradients gradients) override;
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
  /// Takes the memory for steps that have been checked, and for those in `plan`. Returns a function that runs `plan`,
  /// then `steps`, and passes them to `finish`.
  template <class Step>
  detail::PreparedStep prepared(detail::StepPlan plan, const detail::Multiplier& multiplier, std::vector<Step> steps,
                                std::function<void(std::vector<Step>& steps)> finish);
  bool rounds_any() const { return rounding_seed_.has_value(); }
  bool rounds(const at::Tensor& parameter) const { return rounds_any() && parameter.scalar_type() == at::kBFloat16; }
  /// Removes the steps that the device skipped from the counts. Synchronizes if it may have skipped any.
  void sync_step_count() const;

  // These functions add this library's part to files of LibTorch's format.
  void begin_saving() const;
  void end_saving(torch::serialize::OutputArchive& archive) const;
  void end_loading(torch::serialize::InputArchive& archive);

  virtual torch::optim::Optimizer& itself() = 0;
  virtual const char* class_name() const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> new_state() const = 0;
  /// Returns true if the state counts steps.
  virtual bool counts_steps() const = 0;

 private:
  friend std::function<void()> detail::prepare_state_of(torch::optim::Optimizer& optimizer,
                                                        const detail::NamedParameters& parameters,
                                                        detail::NamedTensors tensors, bool lenient);

  const torch::optim::Optimizer& itself() const { return const_cast<OnePass&>(*this).itself(); }
  /// Prepares a step of all parameters that have a gradient.
  virtual detail::PreparedStep prepare_steps(const detail::GradientOf& gradient_of,
                                             const detail::Multiplier& multiplier) = 0;

  void check_distinct();
  template <class Step>
  void set_rounding_keys(std::vector<Step>& steps, std::vector<std::int64_t>& rounded_steps) const;
  void set_rounded_steps(std::vector<std::int64_t> steps);

  std::vector<std::int64_t> rounded_steps_;               // steps with random numbers, per parameter
  std::vector<const void*> distinct_;                     // the parameters, which were checked to be distinct
  std::unordered_map<const void*, std::size_t> indices_;  // each parameter's index, counted across the groups
  std::optional<std::uint64_t> rounding_seed_;            // set by the program, and not a part of the state
  mutable at::Tensor skipped_steps_;                      // the number of skipped steps, known on the device only
  mutable std::vector<at::Tensor> concerned_;             // the parameters of those steps
};

/// The steps of an optimizer whose elements do not depend on one another.
class ElementSteps : public OnePass {
 private:
  virtual void check_options(const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns the settings of a parameter's next step.
  virtual detail::AnyStep step_of(const torch::optim::OptimizerOptions& options, const at::Tensor& parameter,
                                  const torch::optim::OptimizerParamState& state) const = 0;
  virtual detail::StateParts parts_of(torch::optim::OptimizerParamState& state) const = 0;

 protected:
  GRADACCUM_INLINE detail::PreparedStep prepare_steps(const detail::GradientOf& gradient_of,
                                                      const detail::Multiplier& multiplier) override;
};

/// LibTorch's optimizer `Base` with the steps of `Core`. `Derived` has a `name`.
template <class Derived, class Base, class State, class Core = OnePass>
class OnePassOptimizer : public Base, public Core {
 public:
  using Base::Base;

  using Core::step;
  /// Returns an empty function for derived classes, whose `step` may do more.
  std::function<void()> prepare(Gradients gradients) override {
    return typeid(*this) == typeid(Derived) ? Core::prepare(std::move(gradients)) : nullptr;
  }
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override { return this->step_after(closure); }
  /// Returns false with stochastic rounding, which counts random numbers from a parameter's first element, and for
  /// derived classes, which may look at whole parameters.
  bool steps_by_elements() const override { return typeid(*this) == typeid(Derived) && !this->rounds_any(); }

  void save(torch::serialize::OutputArchive& archive) const override {
    this->begin_saving();
    Base::save(archive);
    this->end_saving(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    this->sync_step_count();
    Base::load(archive);
    this->end_loading(archive);
  }
  std::map<std::string, at::Tensor> named_state(
      const torch::OrderedDict<std::string, at::Tensor>& parameters) const override {
    return OnePass::named_state(parameters);
  }

  /// Returns LibTorch's state. Through a `torch::optim::Optimizer&` its counts may include steps that a device skipped.
  auto& state() { return this->sync_step_count(), Base::state(); }
  const auto& state() const { return this->sync_step_count(), Base::state(); }

 protected:
  /// Finds the state of a parameter; nullptr if there is none.
  const State* known_state(const at::Tensor& parameter) const {
    const auto known = this->state_.find(parameter.unsafeGetTensorImpl());
    return known == this->state_.end() ? nullptr : static_cast<const State*>(known->second.get());
  }
  /// Returns the state of a parameter, a new one if there is none.
  State& state_of(const at::Tensor& parameter) {
    auto& state = this->state_[parameter.unsafeGetTensorImpl()];
    if (!state) state = new_state();
    return static_cast<State&>(*state);
  }
  torch::optim::Optimizer& itself() override { return *this; }
  const char* class_name() const override { return Derived::name; }
  std::unique_ptr<torch::optim::OptimizerParamState> new_state() const override { return std::make_unique<State>(); }

 private:
  std::function<void()> take_named_state(const detail::NamedParameters& parameters, detail::NamedTensors state,
                                         bool lenient) override {
    return OnePass::take_named_state(parameters, std::move(state), lenient);
  }
  bool counts_steps() const override {
    if constexpr (requires { State::counts_steps; })
      return State::counts_steps;
    else
      return requires(State state) { state.step(); };
  }
};

/// LibTorch's optimizer `Base` with a step of single elements, whose settings `Derived::next_step(options, state)`
/// returns.
template <class Derived, class Base, class Options, class State>
class ElementOptimizer : public OnePassOptimizer<Derived, Base, State, ElementSteps> {
 public:
  using OnePassOptimizer<Derived, Base, State, ElementSteps>::OnePassOptimizer;

 private:
  void check_options(const torch::optim::OptimizerOptions& options) const override {
    if constexpr (requires(const Options& of) { Derived::check(of); })
      Derived::check(static_cast<const Options&>(options));
  }
  detail::AnyStep step_of(const torch::optim::OptimizerOptions& options, [[maybe_unused]] const at::Tensor& parameter,
                          const torch::optim::OptimizerParamState& state) const override {
    const auto& itself = static_cast<const Derived&>(*this);
    const auto& of_group = static_cast<const Options&>(options);
    [[maybe_unused]] const auto& so_far = static_cast<const State&>(state);
    if constexpr (requires { itself.next_step(of_group); })
      return itself.next_step(of_group);
    else if constexpr (requires { itself.next_step(of_group, so_far); })
      return itself.next_step(of_group, so_far);
    else
      return itself.next_step(of_group, so_far, parameter);
  }
  detail::StateParts parts_of(torch::optim::OptimizerParamState& state) const override {
    if constexpr (requires(State of) { of.parts(); })
      return static_cast<State&>(state).parts();
    else
      return detail::parts_of_torch(static_cast<State&>(state));
  }
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/one_pass.ipp>
#endif
