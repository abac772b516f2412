// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/multiplier.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE Gradients::Gradients(const std::vector<at::Tensor>& parameters)
    : window_(std::make_shared<detail::WindowGradients>(parameters)) {}

GRADACCUM_INLINE Gradients::Gradients(std::shared_ptr<detail::WindowGradients> window) : window_(std::move(window)) {}

GRADACCUM_INLINE std::vector<at::Tensor> Gradients::values() {
  window_->apply();
  return window_->raw();
}

GRADACCUM_INLINE at::Tensor Gradients::multiplier(at::Device device) const { return window_->multiplier().on(device); }

GRADACCUM_INLINE void Gradients::set_norm_before_clipping(at::Tensor norm) {
  window_->set_norm_before_clipping(std::move(norm));
}

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
GRADACCUM_INLINE void Gradients::apply() { window_->apply(); }
GRADACCUM_INLINE bool Gradients::closed() const { return window_->closed(); }
GRADACCUM_INLINE detail::Multiplier product_of(const Gradients& gradients) { return gradients.window_->multiplier(); }

}  // namespace gradaccum
