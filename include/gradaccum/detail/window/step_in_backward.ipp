// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/step_in_backward.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/arrival_scope.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The gradients that a backward pass has computed so far. Steps their parameters, and frees them.
///
/// Backward runs a thread for each device, which may have several streams: gradients that wait to be stepped together
/// wait on their own stream.
class ArrivingGradients final : public ArrivalListener {
 public:
  ArrivingGradients(std::shared_ptr<WindowGradients> window, std::optional<at::ScalarType> accumulate_in,
                    const StepOfSome& step)
      : window_(std::move(window)),
        parameters_(window_->all_parameters()),
        arrived_(parameters_.size()),
        accumulate_in_(accumulate_in),
        step_(step) {}

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }

  void arrive(std::size_t place) override {
    const std::lock_guard lock(mutex_);
    if (ended_ || window_->closed()) return;
    const auto& parameter = parameters_[place];
    TORCH_CHECK(!arrived_[place], "GradAccumulator: in_backward steps a parameter once, and the gradient of parameter ",
                place, " (shape ", parameter.sizes(),
                ") arrived twice in one pass: an operation runs a backward of its own inside; leave in_backward out");
    arrived_[place] = true;
    auto& waiting = waiting_[current_stream(parameter.device())];
    waiting.places.push_back(place);
    waiting.elements += parameter.numel();
    if (waiting.elements >= enough) step(std::exchange(waiting, {}).places);
  }

  /// Steps the parameters that still wait, once backward is complete.
  void step_waiting() {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> all;
    for (auto& [stream, waiting] : waiting_) all.insert(all.end(), waiting.places.begin(), waiting.places.end());
    waiting_.clear();
    if (!all.empty() && !window_->closed()) step(all);
  }

  void end() override {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }

 private:
  struct Waiting {
    std::vector<std::size_t> places;
    std::int64_t elements = 0;
  };
  static constexpr std::int64_t enough = 1 << 16;  // elements: a parallel loop for each small tensor would cost more

  static c10::Stream current_stream(at::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  void step(const std::vector<std::size_t>& places) {
    at::NoGradGuard no_grad;
    for (auto place : places) window_->fold_into_sum(place, accumulate_in_);
    const auto part = window_->part(places);
    if (step_(Gradients(part))) window_->set_stepped();
    part->free();
  }

  const std::shared_ptr<WindowGradients> window_;
  const std::vector<at::Tensor> parameters_;
  std::vector<bool> arrived_;
  std::optional<at::ScalarType> accumulate_in_;
  StepOfSome step_;
  std::unordered_map<c10::Stream, Waiting> waiting_;
  bool ended_ = false;
  std::mutex mutex_;
};

GRADACCUM_INLINE void step_in_backward(const std::shared_ptr<WindowGradients>& window,
                                       std::optional<at::ScalarType> accumulate_in, const StepOfSome& step,
                                       c10::function_ref<void()> backward) {
  const auto gradients = std::make_shared<ArrivingGradients>(window, accumulate_in, step);
  try {
    const ArrivalScope scope(gradients);
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
