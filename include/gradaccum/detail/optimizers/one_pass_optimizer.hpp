// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/optimizers/distinct_parameters.hpp>
#include <gradaccum/detail/optimizers/stochastic_rounding.hpp>
#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Finds the gradients of a window by their parameters.
class GradientsByParameter {
 public:
  explicit GradientsByParameter(const Gradients& gradients) : raw_(gradients.raw()) {
    const auto parameters = gradients.parameters();
    for (std::size_t i = 0; i < raw_.size(); ++i) index_.emplace(parameters[i].unsafeGetTensorImpl(), i);
  }
  bool empty() const { return raw_.empty(); }
  const at::Tensor& operator()(const at::Tensor& parameter) const {
    static const at::Tensor none;
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    return found == index_.end() ? none : raw_[found->second];
  }

 private:
  std::vector<at::Tensor> raw_;
  std::unordered_map<const void*, std::size_t> index_;
};

/// Takes the steps of parameters on the CPU, and those of all others.
template <class Step>
void take(std::vector<Step> steps, const Multiplier& multiplier) {
  const auto away = std::stable_partition(steps.begin(), steps.end(),
                                          [](const Step& step) { return step.parameter.device().is_cpu(); });
  const std::vector<Step> on_device(std::make_move_iterator(away), std::make_move_iterator(steps.end()));
  steps.erase(away, steps.end());
  if (!steps.empty())
    take_on_cpu(steps, multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).template item<double>());
  if (!on_device.empty()) take_on_device(on_device, multiplier);
}

/// LibTorch's optimizer `Base`, with a step of our own: `Derived` has `move(gradient_of, multiplier)`, which steps all
/// parameters that have a gradient. Options, state, groups, saving and loading are LibTorch's.
template <class Base, class Derived, class ParamState>
class OnePassOptimizer : public Base, public TakesGradients, public NamesItsState {
 public:
  using Base::Base;
  using LossClosure = torch::optim::Optimizer::LossClosure;

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      at::AutoGradMode with_gradients(true);
      loss = closure();
    }
    move([](const at::Tensor& parameter) -> const at::Tensor& { return parameter.grad(); }, {});
    return loss;
  }

  void step(Gradients gradients) override {
    if (gradients.overflowed()) return;
    const GradientsByParameter gradient_of(gradients);
    bool any = gradient_of.empty();
    for_each_parameter(*this, [&](const at::Tensor& parameter) { any = any || gradient_of(parameter).defined(); });
    TORCH_CHECK(any, Derived::name, ": step(gradients) was given those of other parameters than the optimizer's");
    move(gradient_of, product_of(gradients));
  }

  /// From now on bfloat16 parameters are rounded up or down at random, each way as often as it is near: the mean of
  /// many steps is exact, where steps too small for the nearest number would all be lost. The same seed gives the same
  /// bits, whatever the number of threads. Other parameters are not concerned.
  void stochastic_rounding(std::uint64_t seed) { rounding_.seed(seed); }

  void save(torch::serialize::OutputArchive& archive) const override {
    Base::save(archive);
    save_rounding(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    Base::load(archive);
    load_rounding(archive);
  }

  /// The state by the parameters' names, `exp_avg.0.weight`, for any file format. The tensors are the optimizer's own.
  NamedTensors named_state(const NamedParameters& parameters) const override {
    const NameOf name_of(parameters);
    auto all = named_state_of<ParamState>(*this, name_of);
    std::size_t place = 0;
    for_each_parameter(*this, [&](const at::Tensor& parameter) {
      if (const auto steps = rounding_.steps_of(place++); steps > 0)
        all.emplace(rounding_name + name_of(parameter), at::scalar_tensor(static_cast<double>(steps), at::kDouble));
    });
    return all;
  }

  /// Replaces the state by what `named_state` gave, in this program or another; tensors are copied. Parameters of which
  /// it has nothing begin afresh. A name that no parameter has, or another shape, is an error; then nothing has
  /// changed.
  void load_named_state(const NamedParameters& parameters, NamedTensors state) {
    take_named_state(parameters, std::move(state), /*lenient=*/false)();
  }
  std::function<void()> take_named_state(const NamedParameters& parameters, NamedTensors state, bool lenient) override {
    const NameOf name_of(parameters);
    std::vector<std::int64_t> steps;
    for_each_parameter(*this, [&](const at::Tensor& parameter) {
      steps.push_back(take_count(state, rounding_name + name_of(parameter)).value_or(0));
    });
    const auto become = take_states<ParamState>(*this, name_of, state, lenient);
    TORCH_CHECK(lenient || state.empty(), Derived::name,
                ": load_named_state: there is no parameter, or no such state, for ",
                state.empty() ? "" : state.begin()->first);
    return [this, become, steps] {
      rounding_.set_steps(steps);
      become();
    };
  }

 protected:
  /// Takes steps that have all been checked: from here on the random numbers by which they round are counted.
  template <class Step>
  void take_steps(std::vector<Step> steps, const Multiplier& multiplier) {
    for (auto& step : steps) step.rounding_key = rounding_.next_key(step.parameter, distinct_.place_of(step.parameter));
    take(std::move(steps), multiplier);
  }
  bool rounds(const at::Tensor& parameter) const { return rounding_.concerns(parameter); }
  void save_rounding(torch::serialize::OutputArchive& archive) const {
    if (!rounding_.steps().empty()) archive.write(rounding_key, c10::IValue(rounding_.steps()));
  }
  void load_rounding(torch::serialize::InputArchive& archive) {
    c10::IValue steps;
    rounding_.set_steps(archive.try_read(rounding_key, steps) ? steps.toIntVector() : std::vector<std::int64_t>());
  }

 private:
  static constexpr const char *rounding_key = "rounding_steps", *rounding_name = "rounding_step.";

  template <class GradientOf>
  void move(const GradientOf& gradient_of, const Multiplier& multiplier) {
    at::NoGradGuard no_grad;
    distinct_.check(Derived::name, this->param_groups());
    static_cast<Derived&>(*this).move(gradient_of, multiplier);
  }

  DistinctParameters distinct_;
  StochasticRounding rounding_;
};

}  // namespace gradaccum::detail
