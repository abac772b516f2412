// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/any_optimizer.hpp>

#include <c10/util/FunctionRef.h>

#include <memory>

namespace gradaccum::detail {

class WindowGradients;

/// Runs `backward`, and steps each parameter of `window` when its gradient arrives. The window's factor and weights
/// must be complete.
void step_in_backward(const std::shared_ptr<WindowGradients>& window, AnyOptimizer& optimizer,
                      c10::function_ref<void()> backward);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/step_in_backward.ipp>
#endif
