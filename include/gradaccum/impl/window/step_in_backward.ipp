// SPDX-License-Identifier: Apache-2.0
// Steps parameters during backward, as their gradients arrive.
#pragma once

#include <gradaccum/detail/window/open_window.hpp>

#include <gradaccum/detail/window/grad_ready_hooks.hpp>
#include <gradaccum/detail/window/misuse.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Collects the gradients that a backward pass has computed, steps their parameters, and frees them. Backward runs a
/// thread for each device, which may use several streams: gradients wait per stream until they are stepped together.
class ArrivingGradients final : public GradReadyListener {
 public:
  ArrivingGradients(std::shared_ptr<WindowGradients> window, AnyOptimizer& optimizer)
      : GradReadyListener(window->all_parameters()),
        window_(std::move(window)),
        arrived_(parameters_.size()),
        optimizer_(optimizer) {}

  void grad_ready(std::size_t place) override {
    const std::lock_guard lock(mutex_);
    if (ended_ || window_->closed()) return;
    const auto& parameter = parameters_[place];
    TORCH_CHECK(!arrived_[place], "GradAccumulator: in_backward steps a parameter once, but the gradient of parameter ",
                place, " (shape ", parameter.sizes(),
                ") arrived twice in one pass: an operation runs its own backward inside; turn in_backward off");
    arrived_[place] = true;
    auto& waiting = waiting_[c10::impl::VirtualGuardImpl(parameter.device().type()).getStream(parameter.device())];
    waiting.places.push_back(place);
    waiting.elements += parameter.numel();
    if (waiting.elements >= enough) step(std::exchange(waiting, {}).places);
  }

  /// Steps the remaining parameters after backward is complete.
  void step_waiting() {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> all;
    for (auto& [stream, waiting] : waiting_) all.insert(all.end(), waiting.places.begin(), waiting.places.end());
    waiting_.clear();
    if (!all.empty() && !window_->closed()) step(all);
  }

 private:
  struct Waiting {
    std::vector<std::size_t> places;
    std::int64_t elements = 0;
  };
  static constexpr std::int64_t enough = 1 << 16;  // elements: a parallel loop for each small tensor would cost more

  void step(const std::vector<std::size_t>& places) {
    at::NoGradGuard no_grad;
    for (auto place : places) window_->fold_into_sum(place);
    const auto part = window_->part(places);
    if (step_optimizer(optimizer_, part->handle())) window_->set_stepped();
    for (auto place : places) parameters_[place].mutable_grad().reset();
    part->close();
  }

  const std::shared_ptr<WindowGradients> window_;
  std::vector<bool> arrived_;
  AnyOptimizer& optimizer_;
  std::unordered_map<c10::Stream, Waiting> waiting_;
};

GRADACCUM_INLINE void step_in_backward(const std::shared_ptr<WindowGradients>& window, AnyOptimizer& optimizer,
                                       c10::function_ref<void()> backward) {
  const auto gradients = std::make_shared<ArrivingGradients>(window, optimizer);
  try {
    const GradReadyScope scope(gradients);
    backward();
    gradients->step_waiting();
  } catch (c10::Error& error) {
    if (window->stepped()) error.add_context(c10::str("GradAccumulator: ", stepped_in_part));
    throw;
  } catch (...) {  // keeps the exception's type
    if (window->stepped()) TORCH_WARN("GradAccumulator: ", stepped_in_part);
    throw;
  }
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
