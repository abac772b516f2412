// SPDX-License-Identifier: Apache-2.0
// Adam with 8-bit moments: selects the parameters whose moments are coded, and checks and orders their state.
#pragma once

#include <gradaccum/optim/adamw8bit.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/eight_bit_moments.hpp>

#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

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
  std::vector<std::int64_t> all(static_cast<std::size_t>(dimensions));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  const bool is_list = order.scalar_type() == at::kLong && order.dim() == 1 && order.numel() == dimensions;
  const bool each_once = is_list && std::ranges::is_permutation(dimensions_in(order), all);
  TORCH_CHECK(each_once, "optimizer state: order must have the dimensions of its parameter, each once");
}

/// The least size for 8-bit moments, which also need float32, bfloat16 or float16. Other tensors keep float moments.
inline constexpr std::int64_t smallest_coded = 4096;

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
  detail::for_each_parameter(*this, [&](auto& parameter) { own.insert(parameter.unsafeGetTensorImpl()); });
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
    return parameter.device() == named.device() && first <= begin && begin < first + named.nbytes();
  });
}

template <class Derived, class Options>
detail::AnyStep Adam8bitOptimizer<Derived, Options>::next_step(const Options& options, const Adam8bitParamState& state,
                                                               const at::Tensor& parameter) const {
  const auto settings = adam_step<Derived>(options, state.step());
  const auto dtype = parameter.scalar_type();
  const bool has_moments = state.exp_avg.defined() || state.exp_avg_sq.defined();
  const bool can_be_coded = parameter.numel() >= detail::smallest_coded && !keeps_in_32_bits(parameter) &&
                            (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
  if (has_moments ? state.coded() : can_be_coded) return detail::Adam8bitStep{settings};
  return settings;
}

template <class Derived, class Options>
detail::PreparedStep Adam8bitOptimizer<Derived, Options>::prepare_steps(const detail::GradientOf& gradient_of,
                                                                        const detail::Multiplier& multiplier) {
  const auto for_each_coded = [this](const auto& visit) {
    for (auto& [parameter, state] : this->state_)
      if (auto& known = static_cast<Adam8bitParamState&>(*state); known.coded()) visit(known);
  };
  for_each_coded([](Adam8bitParamState& state) { state.restore_order(); });
  return [run = ElementSteps::prepare_steps(gradient_of, multiplier), for_each_coded] {
    run();
    for_each_coded([](Adam8bitParamState& state) { state.order = detail::order_of(state.exp_avg); });
  };
}

#ifdef GRADACCUM_COMPILED
template class Adam8bitOptimizer<Adam8bit, Adam8bitOptions>;
template class Adam8bitOptimizer<AdamW8bit, AdamW8bitOptions>;
#endif

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
