// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/arrival_scope.hpp>
#include <gradaccum/detail/window/arriving_gradients.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>

namespace gradaccum::detail {

inline constexpr const char* stepped_in_part =
    "an exception came when backward had stepped some of the parameters, and not the others; load a saved state, or "
    "discard() the window and go on from here";

/// Runs `backward`, and steps the parameters of `window` on the way. Its factor and its weights are complete.
template <class Backward>
void step_in_backward(const std::shared_ptr<WindowGradients>& window, std::optional<at::ScalarType> accumulate_in,
                      const StepOfSome& step, const Backward& backward) {
  const auto gradients = std::make_shared<ArrivingGradients>(window, accumulate_in, step);
  try {
    const ArrivalScope scope(gradients);
    backward();
    gradients->step_waiting();
  } catch (c10::Error& error) {
    if (window->stepped()) error.add_context(c10::str("GradAccumulator: ", stepped_in_part));
    throw;
  } catch (...) {  // keeps its type
    if (window->stepped()) TORCH_WARN("GradAccumulator: ", stepped_in_part);
    throw;
  }
}

}  // namespace gradaccum::detail
