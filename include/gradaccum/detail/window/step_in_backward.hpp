// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <memory>
#include <optional>

namespace gradaccum {
class Gradients;
}

namespace gradaccum::detail {

class WindowGradients;

/// A function that steps some of a window's parameters. Returns true if they moved.
using StepOfSome = std::function<bool(Gradients)>;

inline constexpr const char* stepped_in_part =
    "an exception came when backward had stepped some of the parameters, and not the others; load a saved state, or "
    "discard() the window and go on from here";

/// Runs `backward`, and steps the parameters of `window` on the way. The window's factor and weights must be complete.
void step_in_backward(const std::shared_ptr<WindowGradients>& window, std::optional<at::ScalarType> accumulate_in,
                      const StepOfSome& step, c10::function_ref<void()> backward);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/step_in_backward.ipp>
#endif
