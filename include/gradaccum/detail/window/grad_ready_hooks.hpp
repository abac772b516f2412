// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A listener to the gradients that a backward pass computes, on a thread per device.
class GradReadyListener {
 public:
  explicit GradReadyListener(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {}
  virtual ~GradReadyListener() = default;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// Called when backward has added to a parameter's gradient, before hooks that were registered earlier.
  virtual void added(std::size_t /*place*/) {}
  virtual void grad_ready(std::size_t place) = 0;
  /// Returns true if a gradient must not arrive in parts that are added in place.
  virtual bool waits_for_whole() const { return true; }
  /// Ignores all later gradients. (After an exception other threads may still compute some.)
  void end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }

 protected:
  const std::vector<at::Tensor> parameters_;
  std::mutex mutex_;  // guards ended_, and the members of derived classes
  bool ended_ = false;
};

/// A scope for backward passes in which a listener is called for each gradient, after all other hooks.
class GradReadyScope {
 public:
  explicit GradReadyScope(std::shared_ptr<GradReadyListener> listener);
  GradReadyScope& operator=(GradReadyScope&&) = delete;
  ~GradReadyScope();

 private:
  std::shared_ptr<GradReadyListener> listener_;
};

/// Returns true if autograd's engine would only add to the parameter's gradient, and call what `say_added` calls: no
/// hook or listener needs whole gradients.
bool has_no_hooks(const at::Tensor& parameter);
/// Returns true if, in a backward pass, LibTorch would add a gradient of this kind to the existing one in place, and
/// nothing needs the whole gradient. A function may then add parts to `.grad` itself, and call `say_added`.
bool is_added_in_place(const at::Tensor& parameter, const at::Tensor& gradient);
/// Held while a function adds a part, because several threads may run backward of one parameter.
std::mutex& adding_in_place();
/// Calls the listeners after a part has been added to this parameter's gradient.
void say_added(const at::Tensor& parameter);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/grad_ready_hooks.ipp>
#endif
