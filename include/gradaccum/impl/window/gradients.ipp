// SPDX-License-Identifier: Apache-2.0
// Implements the deferred factor, losses and their backward, and clipping.
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/window/backward_seed.hpp>
#include <gradaccum/detail/window/fused_gradients.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Sorts the factors first, because the order of multiplication changes the last bits.
GRADACCUM_INLINE double sorted_product(std::vector<double> factors) {
  std::sort(factors.begin(), factors.end());
  return std::accumulate(factors.begin(), factors.end(), 1.0, std::multiplies<>());
}

/// Multiplies sorted device factors without waiting for the device; undefined if there are none.
GRADACCUM_INLINE at::Tensor sorted_product(const std::vector<at::Tensor>& factors) {
  if (factors.size() < 2) return factors.empty() ? at::Tensor() : factors.front();
  std::vector<at::Tensor> on_one_device;
  for (auto& factor : factors) on_one_device.push_back(factor.to(factors.front().device(), /*non_blocking=*/true));
  return std::get<0>(at::stack(on_one_device).sort()).prod();
}

/// Copies a factor, since its owner may change the tensor before it is used.
GRADACCUM_INLINE at::Tensor copied_factor(const at::Tensor& by) {
  return by.detach().to(at::kDouble, /*non_blocking=*/true, /*copy=*/true);
}

}  // namespace detail

GRADACCUM_INLINE bool Factor::on_host(const at::Tensor& by) {
  TORCH_CHECK(by.defined() && by.dim() == 0, "Factor: must be a number or a 0-dim tensor, got ",
              by.defined() ? c10::str("shape ", by.sizes()) : "an undefined tensor");
  return by.device().is_cpu();
}

GRADACCUM_INLINE void Factor::multiply(const at::Tensor& by) {
  if (on_host(by)) return multiply(by.item<double>());
  device_multipliers_.push_back(detail::copied_factor(by));
}

GRADACCUM_INLINE void Factor::divide(double by) {
  TORCH_CHECK(by != 0, "Factor: a divisor must not be 0");
  divisors_.push_back(by);
}

GRADACCUM_INLINE void Factor::divide(const at::Tensor& by) {
  if (on_host(by)) return divide(by.item<double>());
  device_divisors_.push_back(detail::copied_factor(by));
}

GRADACCUM_INLINE detail::Multiplier product_of(const Factor& factor) {
  return {detail::sorted_product(factor.multipliers_), detail::sorted_product(factor.divisors_),
          detail::sorted_product(factor.device_multipliers_), detail::sorted_product(factor.device_divisors_)};
}

GRADACCUM_INLINE Factor requirement_of(const Factor& factor) {
  Factor bare;
  bare.finiteness_ = factor.finiteness_;
  return bare;
}

GRADACCUM_INLINE Gradients::Gradients(const std::vector<at::Tensor>& parameters)
    : window_(std::make_shared<detail::WindowGradients>(parameters)) {}

GRADACCUM_INLINE std::vector<at::Tensor> Gradients::values() {
  window_->apply();
  return window_->raw();
}

GRADACCUM_INLINE at::Tensor Gradients::multiplier(at::Device device) const { return window_->multiplier().on(device); }

GRADACCUM_INLINE const at::Tensor& Gradients::norm_before_clipping() const { return window_->norm_before_clipping(); }
GRADACCUM_INLINE Factor& Gradients::factor() { return window_->factor(); }
GRADACCUM_INLINE double Gradients::items() const { return window_->items(); }
GRADACCUM_INLINE std::vector<at::Tensor> Gradients::parameters() const { return window_->parameters(); }
GRADACCUM_INLINE std::vector<at::Tensor> Gradients::raw() const { return window_->raw(); }
GRADACCUM_INLINE at::Tensor Gradients::norm() { return window_->norm(); }
GRADACCUM_INLINE at::Tensor Gradients::found_inf() { return window_->found_inf(); }
GRADACCUM_INLINE bool Gradients::finite_required() const { return window_->must_be_finite(); }
GRADACCUM_INLINE bool Gradients::overflowed() { return window_->overflowed(); }
GRADACCUM_INLINE bool Gradients::may_be_judged_on_device() const { return window_->may_be_judged_on_device(); }
GRADACCUM_INLINE at::Tensor Gradients::judge_on_device() { return window_->judge_on_device(); }
GRADACCUM_INLINE bool Gradients::judged() const { return window_->judged(); }
GRADACCUM_INLINE bool Gradients::judged_on_device() const { return window_->judged_on_device(); }
GRADACCUM_INLINE void Gradients::reject(std::string why) { window_->reject(std::move(why)); }
GRADACCUM_INLINE const std::optional<std::string>& Gradients::rejected() const { return window_->rejected(); }
GRADACCUM_INLINE void Gradients::apply() { window_->apply(); }
GRADACCUM_INLINE bool Gradients::closed() const { return window_->closed(); }
GRADACCUM_INLINE detail::Multiplier product_of(const Gradients& gradients) { return gradients.window_->multiplier(); }

GRADACCUM_INLINE Loss Loss::with(at::Tensor output_of_model, at::Tensor wanted) const {
  auto loss = *this;
  loss.output = std::move(output_of_model);
  loss.target = std::move(wanted);
  return loss;
}

GRADACCUM_INLINE Loss
Loss::with_gradients(std::vector<at::Tensor> parameters,
                     std::function<std::vector<at::Tensor>(const at::Tensor& seed)> gradients) const {
  check_shape();
  auto fused = std::make_shared<detail::FusedGradients>(mean, std::move(parameters), std::move(gradients));
  auto loss = *this;
  loss.mean = fused->attached_mean();
  loss.gradients_ = std::move(fused);
  return loss;
}

GRADACCUM_INLINE void Loss::check_shape() const {
  TORCH_CHECK(mean.defined() && mean.numel() == 1, "Loss: the mean must have one element, got ",
              mean.defined() ? c10::str("shape ", mean.sizes()) : "an undefined tensor");
}

GRADACCUM_INLINE void Loss::check() const {
  check_shape();
  TORCH_CHECK(items == 0 || mean.requires_grad(), "Loss: the mean must require grad for backward, but does not");
}

GRADACCUM_INLINE Loss Loss::plus(const at::Tensor& other, double weight) const {
  Loss(other).check_shape();
  detail::Window::check_weight(weight);
  TORCH_CHECK(items > 0, "Loss: items must be > 0 to add another loss to it, got ", items,
              "; a loss of no items has no weight in its window");
  auto sum = *this;
  sum.mean = mean + other * (weight / items);
  return sum;
}

GRADACCUM_INLINE at::Tensor backward_seed() {
  using detail::BackwardSeed;
  const auto* const pass = dynamic_cast<BackwardSeed*>(c10::ThreadLocalDebugInfo::get(BackwardSeed::key()));
  if (!pass) return at::scalar_tensor(1, at::kDouble);
  return pass->seed.on_host() ? at::scalar_tensor(pass->seed.host(), at::kDouble) : pass->seed.on(pass->device);
}

GRADACCUM_INLINE void Loss::backward(const BackwardOptions& options) const {
  check();
  const auto by = product_of(seed);
  const bool plain = !options.retain_graph.value_or(false) && !options.create_graph && options.inputs.empty();
  if (gradients_ && plain && gradients_->add_to_parameters(mean, by)) return;
  at::Tensor start;
  if (by.on_host() && !by.is_one()) start = at::full_like(mean, by.host());
  if (!by.on_host()) start = by.on(mean.device()).to(mean.scalar_type()).expand_as(mean);
  const auto inputs = options.inputs.empty() ? std::nullopt : std::optional<at::TensorList>(options.inputs);
  const detail::BackwardSeedScope seed_of_pass(by, mean.device());
  const auto run = [&] { mean.backward(start, options.retain_graph, options.create_graph, inputs); };
  const auto why = [] {
    return "Loss: a batch, a recurrent state or another loss shares a part of this graph, which backward has freed: "
           "detach() its tensors, or add the losses";
  };
  detail::explaining("graph a second time", why, run);
}

GRADACCUM_INLINE at::Tensor clip_grad_norm_(Gradients gradients, double max_norm) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  return gradients.window_->clip(max_norm);
}

GRADACCUM_INLINE at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                            double norm_type, bool error_if_nonfinite) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  TORCH_CHECK(norm_type > 0, "clip_grad_norm_: norm_type must be > 0, got ", norm_type);
  at::NoGradGuard no_grad;
  Gradients gradients(parameters);
  at::Tensor norm;
  if (norm_type == 2.0) {
    norm = clip_grad_norm_(gradients, max_norm);
  } else {
    norm = detail::norms(gradients.raw(), norm_type).norm(norm_type);
    detail::clip_by(gradients.factor(), norm, max_norm);
  }
  TORCH_CHECK(!error_if_nonfinite || norm.isfinite().item<bool>(), "clip_grad_norm_: the norm must be finite, got ",
              norm.item<double>(), "; pass error_if_nonfinite = false to clip anyway");
  gradients.apply();
  return norm;
}

GRADACCUM_INLINE void clip_grad_value_(Gradients gradients, double clip_value) {
  TORCH_CHECK(clip_value >= 0, "clip_grad_value_: clip_value must be >= 0, got ", clip_value);
  at::NoGradGuard no_grad;
  for (const auto& gradient : gradients.values()) {
    if (!gradient.is_sparse()) {
      gradient.clamp_(-clip_value, clip_value);
    } else {  // the duplicates of a sparse gradient are summed first
      const auto summed = gradient.coalesce();
      summed._values().clamp_(-clip_value, clip_value);
      gradient.copy_(summed);
    }
  }
}

GRADACCUM_INLINE void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  clip_grad_value_(Gradients(parameters), clip_value);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
