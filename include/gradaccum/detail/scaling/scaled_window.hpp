// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/types/type_name.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

namespace gradaccum::detail {

/// What a window says about the scale; of several the last one here counts.
enum class Verdict { none, clean, overflow };

/// One optimizer's window, as a loss scaler sees it: its gradients have the scale still in them, until it is unscaled
/// or closed.
struct ScaledWindow {
  enum class Stage { ready, unscaled, stepped };

  Stage stage = Stage::ready;
  std::optional<Gradients> gradients = {};  ///< none: the scaler has not met this window yet
  std::function<void()> end = {};           ///< closes it: by `discard()`, where it is an accumulator's
  bool of_accumulator = false;

  bool closed() const { return !gradients || gradients->closed(); }
  bool open() const { return of_accumulator && !closed(); }
  Verdict verdict();
};

/// It has one if somebody was about to step with it, the scaler or an accumulator's `flush()`; or if it was unscaled,
/// whatever has become of it since.
inline Verdict ScaledWindow::verdict() {
  const auto overflowed = [](bool yes) { return yes ? Verdict::overflow : Verdict::clean; };
  if (!gradients) return Verdict::none;
  if (closed() && gradients->judged()) return overflowed(gradients->overflowed());
  if (stage == Stage::unscaled) return overflowed(gradients->found_inf().item<float>() != 0);
  return Verdict::none;
}

/// The window that an accumulator has open; of any other optimizer, one of a single batch.
template <class Optimizer>
ScaledWindow scaled_window(Optimizer& optimizer) {
  if constexpr (accumulating<Optimizer>) {
    return {.gradients = optimizer.gradients(), .end = [&optimizer] { optimizer.discard(); }, .of_accumulator = true};
  } else {
    auto gradients = std::make_shared<WindowGradients>(parameters_of(optimizer));
    return {.gradients = Gradients(gradients), .end = [gradients] { gradients->close(); }};
  }
}

/// What a reference can hide, and a type would have told the compiler.
inline void check_nothing_hides_behind(const torch::optim::Optimizer& optimizer) {
  TORCH_CHECK(!dynamic_cast<const OptimizerFacade*>(&optimizer),
              "AmpScaler: an accumulator must not hide behind a torch::optim::Optimizer&, which knows nothing of its "
              "window; pass the accumulator itself");
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              "AmpScaler: must not be given LBFGS, which calls its closure several times a step, each with gradients "
              "of its own; use SGD, Adam, AdamW, RMSprop, Adagrad or one of your own");
}

template <class Optimizer>
void check_can_be_scaled(const Optimizer& optimizer) {
  static_assert(!std::derived_from<Optimizer, torch::optim::LBFGS>,
                "AmpScaler: LBFGS calls its closure several times a step, each with gradients of its own; use SGD, "
                "Adam, AdamW, RMSprop, Adagrad or one of your own");
  static_assert(gradaccum::optimizer<Optimizer> || std::derived_from<Optimizer, torch::optim::LBFGS>,
                "AmpScaler: an optimizer has step(), zero_grad() and param_groups()");
  if constexpr (std::derived_from<Optimizer, torch::optim::Optimizer>) check_nothing_hides_behind(optimizer);
}

/// The update itself would round away what the loss scale has saved.
inline void check_none_is_half(const std::vector<at::Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    const auto dtype = gradient.defined() ? gradient.scalar_type() : parameters[i].scalar_type();
    TORCH_CHECK(!parameters[i].requires_grad() || at::toRealValueType(dtype) != at::kHalf,
                "AmpScaler: parameters and gradients must not be float16, got parameter ", i, " (shape ",
                parameters[i].sizes(), "); keep parameters in float32 and run forward inside an Autocast");
  }
}

}  // namespace gradaccum::detail
