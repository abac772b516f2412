// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam8bit_step.hpp>
#include <gradaccum/detail/optimizers/own_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gradaccum::optim {

/// The moments of one parameter: codes of 8 bits with their scales, or float tensors where it is small.
class Adam8bitParamState : public detail::OwnParamState<Adam8bitParamState> {
 public:
  std::vector<std::pair<std::string, at::Tensor*>> tensors() {
    return {{"exp_avg", &exp_avg},
            {"exp_avg_sq", &exp_avg_sq},
            {"exp_avg_scale", &exp_avg_scale},
            {"exp_avg_sq_scale", &exp_avg_sq_scale}};
  }
  bool coded() const { return exp_avg.defined() && exp_avg.scalar_type() == at::kByte; }

  /// Throws where this is not the state of such a parameter.
  void check(const at::Tensor& parameter) const {
    if (coded()) {
      detail::settled({exp_avg, exp_avg_scale}, parameter, true, "exp_avg");
      detail::settled({exp_avg_sq, exp_avg_sq_scale}, parameter, false, "exp_avg_sq");
    } else {
      detail::settled(exp_avg, parameter, "exp_avg");
      detail::settled(exp_avg_sq, parameter, "exp_avg_sq");
    }
    TORCH_CHECK(exp_avg.defined() && exp_avg_sq.defined(),
                "optimizer state: exp_avg and exp_avg_sq must both be there");
  }

  at::Tensor exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
};

}  // namespace gradaccum::optim

namespace gradaccum::detail {

/// What Adam8bit and AdamW8bit share: all but where the weight decay goes.
template <class Derived, class Options, bool decoupled>
class Adam8bitOptimizer : public OwnOptimizer<Derived, Options, optim::Adam8bitParamState> {
  using Own = OwnOptimizer<Derived, Options, optim::Adam8bitParamState>;

 public:
  using Own::Own;
  using Own::step;

  /// Smaller tensors, and those of other dtypes than float32, bfloat16 and float16, keep their moments as floats.
  static constexpr std::int64_t smallest_coded = 4096;

  static void check(const Options& options) {
    const auto [beta1, beta2] = options.betas();
    TORCH_CHECK(options.lr() >= 0, Derived::name, ": lr must be >= 0, got ", options.lr());
    TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, Derived::name, ": betas must be in [0, 1), got ",
                beta1, " and ", beta2);
    TORCH_CHECK(options.eps() >= 0, Derived::name, ": eps must be >= 0, got ", options.eps());
    TORCH_CHECK(options.weight_decay() >= 0, Derived::name, ": weight_decay must be >= 0, got ",
                options.weight_decay());
    TORCH_CHECK(!options.amsgrad(), Derived::name, ": there is no amsgrad with moments of 8 bits");
  }

 private:
  friend OnePassOptimizer<torch::optim::Optimizer, Derived, optim::Adam8bitParamState>;
  using State = optim::Adam8bitParamState;

  template <class GradientOf>
  void move(const GradientOf& gradient_of, const Multiplier& multiplier) {
    std::vector<AdamStep> whole;
    std::vector<Adam8bitStep> coded;
    std::vector<std::pair<at::Tensor, State>> states;  // the optimizer's once the step is taken
    for (auto& group : this->param_groups()) {
      Derived::check(this->options_of(group));
      for (auto& parameter : group.params())
        if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined())
          states.emplace_back(parameter, prepare(parameter, gradient, this->options_of(group), whole, coded));
    }
    if (!whole.empty()) this->take_steps(std::move(whole), multiplier);
    if (!coded.empty()) this->take_steps(std::move(coded), multiplier);
    this->keep(std::move(states));
  }

  State prepare(const at::Tensor& parameter, const at::Tensor& gradient, const Options& options,
                std::vector<AdamStep>& whole, std::vector<Adam8bitStep>& coded) const {
    check_can_be_stepped_densely(Derived::name, parameter, gradient);
    State state = this->state_of(parameter);
    const AdamSettings settings = settings_of(options, state.step() + 1);
    const bool known = state.exp_avg.defined() || state.exp_avg_sq.defined();
    if (known ? state.coded() : can_be_coded(parameter)) {
      coded.push_back({settings, parameter, gradient,
                       settled({state.exp_avg, state.exp_avg_scale}, parameter, true, "exp_avg"),
                       settled({state.exp_avg_sq, state.exp_avg_sq_scale}, parameter, false, "exp_avg_sq")});
      std::tie(state.exp_avg, state.exp_avg_scale) = std::tie(coded.back().exp_avg.codes, coded.back().exp_avg.scales);
      std::tie(state.exp_avg_sq, state.exp_avg_sq_scale) =
          std::tie(coded.back().exp_avg_sq.codes, coded.back().exp_avg_sq.scales);
    } else {
      whole.push_back({settings, parameter, gradient, settled(state.exp_avg, parameter, "exp_avg"),
                       settled(state.exp_avg_sq, parameter, "exp_avg_sq"), at::Tensor()});
      std::tie(state.exp_avg, state.exp_avg_sq) = std::tie(whole.back().exp_avg, whole.back().exp_avg_sq);
    }
    state.step(settings.step);
    return state;
  }

  static AdamSettings settings_of(const Options& options, std::int64_t step) {
    const auto [beta1, beta2] = options.betas();
    return {options.lr(), beta1, beta2, options.eps(), options.weight_decay(), /*amsgrad=*/false, decoupled, step};
  }
  static bool can_be_coded(const at::Tensor& parameter) {
    const auto dtype = parameter.scalar_type();
    return parameter.numel() >= smallest_coded && (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
  }
};

}  // namespace gradaccum::detail
