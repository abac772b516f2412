// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

/// A listener to the gradients that a backward pass computes. Backward runs a thread for each device.
class GradReadyListener {
 public:
  virtual ~GradReadyListener() = default;
  virtual const std::vector<at::Tensor>& parameters() const = 0;
  /// Called when backward has added to a parameter's gradient, before the hooks that were there first.
  virtual void added(std::size_t /*place*/) {}
  /// Called when a parameter's gradient is there.
  virtual void grad_ready(std::size_t place) = 0;
  /// True if a gradient must not come in parts that are added to it in place.
  virtual bool waits_for_whole() const { return true; }
  /// Ends the listening: later gradients are ignored. (After an exception other threads may still bring some.)
  virtual void end() = 0;
};

/// A scope around backward passes in which a listener is called for each gradient, after all other hooks.
class GradReadyScope {
 public:
  explicit GradReadyScope(std::shared_ptr<GradReadyListener> listener);
  GradReadyScope(const GradReadyScope&) = delete;
  GradReadyScope& operator=(const GradReadyScope&) = delete;
  ~GradReadyScope();

 private:
  std::shared_ptr<GradReadyListener> listener_;
  std::vector<const at::Tensor*> listening_;
};

/// Returns true if a listener, or any other hook, waits for whole gradients of this parameter.
bool is_waited_for(const at::Tensor& parameter);
/// Calls the listeners after a part has been added to this parameter's gradient.
void say_added(const at::Tensor& parameter);

}  // namespace gradaccum::detail

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
#include <gradaccum/impl/window/grad_ready_scope.ipp>
#endif
