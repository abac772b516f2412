// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/scaled_window.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <c10/util/Exception.h>

#include <cstddef>
#include <memory>

namespace gradaccum::detail {

/// It has one if somebody was about to step with it, the scaler or an accumulator's `flush()`; or if it was unscaled,
/// whatever has become of it since.
GRADACCUM_INLINE Verdict ScaledWindow::verdict() {
  const auto overflowed = [](bool yes) { return yes ? Verdict::overflow : Verdict::clean; };
  if (!gradients) return Verdict::none;
  if (closed() && gradients->judged()) return overflowed(gradients->overflowed());
  if (stage == Stage::unscaled) return overflowed(gradients->found_inf().item<float>() != 0);
  return Verdict::none;
}

GRADACCUM_INLINE at::Tensor ScaledWindow::found_inf_on_device() const {
  if (!gradients || !gradients->may_be_judged_on_device()) return {};
  const bool unjudged = stage == Stage::unscaled && !(closed() && gradients->judged());
  if (!unjudged && !(closed() && gradients->judged_on_device())) return {};
  const auto found = Gradients(*gradients).found_inf();
  return found.is_cpu() ? at::Tensor() : found;
}

GRADACCUM_INLINE ScaledWindow window_of_one_batch(const std::vector<at::Tensor>& parameters) {
  auto gradients = std::make_shared<WindowGradients>(parameters);
  return {.gradients = Gradients(gradients), .end = [gradients] { gradients->close(); }};
}

GRADACCUM_INLINE void check_nothing_hides_behind(const torch::optim::Optimizer& optimizer) {
  TORCH_CHECK(!dynamic_cast<const OptimizerFacade*>(&optimizer),
              "AmpScaler: an accumulator must not hide behind a torch::optim::Optimizer&, which knows nothing of its "
              "window; pass the accumulator itself");
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              "AmpScaler: must not be given LBFGS, which calls its closure several times a step, each with gradients "
              "of its own; use SGD, Adam, AdamW, RMSprop, Adagrad or one of your own");
}

GRADACCUM_INLINE void check_none_is_half(const std::vector<at::Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    const auto dtype = gradient.defined() ? gradient.scalar_type() : parameters[i].scalar_type();
    TORCH_CHECK(!parameters[i].requires_grad() || at::toRealValueType(dtype) != at::kHalf,
                "AmpScaler: parameters and gradients must not be float16, got parameter ", i, " (shape ",
                parameters[i].sizes(), "); keep parameters in float32 and run forward inside an Autocast");
  }
}

}  // namespace gradaccum::detail
