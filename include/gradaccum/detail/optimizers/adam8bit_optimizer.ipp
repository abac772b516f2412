// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam8bit_optimizer.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/adam8bit_step.hpp>
#include <gradaccum/detail/optimizers/adam_optimizer.hpp>
#include <gradaccum/detail/optimizers/take_steps.hpp>

#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

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
    detail::settled({exp_avg, exp_avg_scale}, parameter, true, "exp_avg");
    detail::settled({exp_avg_sq, exp_avg_sq_scale}, parameter, false, "exp_avg_sq");
  } else {
    detail::settled(exp_avg, parameter, "exp_avg");
    detail::settled(exp_avg_sq, parameter, "exp_avg_sq");
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
  Moves moves;
  this->take_steps(moves, multiplier, steps.whole, steps.coded);
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
