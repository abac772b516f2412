// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/grad_ready_scope.hpp>

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Calls the listener after the hook that was in the slot. The scope owns the listener, which may hold the parameter.
struct GradReadyHook final : torch::autograd::PostAccumulateGradHook {
  GradReadyHook(const std::shared_ptr<GradReadyListener>& whom, std::size_t where)
      : listener(whom), address(whom.get()), place(where) {}

  void operator()(const at::Tensor& parameter) override {
    const auto there = listener.lock();  // keeps the listener alive during the calls
    if (there) there->added(place);
    if (before) (*before)(parameter);
    if (there) there->grad_ready(place);
  }

  std::weak_ptr<GradReadyListener> listener;
  const GradReadyListener* address;
  std::size_t place;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> before;
};

GRADACCUM_INLINE GradReadyScope::GradReadyScope(std::shared_ptr<GradReadyListener> listener)
    : listener_(std::move(listener)) {
  std::vector<std::pair<const at::Tensor*, std::unique_ptr<GradReadyHook>>> hooks;
  const auto& parameters = listener_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad())
      hooks.emplace_back(&parameters[i], std::make_unique<GradReadyHook>(listener_, i));
  for (auto& [parameter, hook] : hooks) listening_.push_back(parameter);
  for (auto& [parameter, hook] : hooks) {
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(*parameter);
    hook->before = std::move(slot);
    slot = std::move(hook);
  }
}

/// Takes a listener's hook out of the chain, since scopes may end in any order.
GRADACCUM_INLINE void take_out(std::unique_ptr<torch::autograd::PostAccumulateGradHook>& slot,
                               const GradReadyListener& listener) {
  auto* const hook = dynamic_cast<GradReadyHook*>(slot.get());
  if (!hook) return;
  if (hook->address != &listener) return take_out(hook->before, listener);
  auto before = std::move(hook->before);
  slot = std::move(before);
}

GRADACCUM_INLINE GradReadyScope::~GradReadyScope() {
  listener_->end();
  for (auto* const parameter : listening_) take_out(torch::autograd::impl::post_acc_grad_hooks(*parameter), *listener_);
}

GRADACCUM_INLINE bool is_waited_for(const at::Tensor& parameter) {
  const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
  while (hook) {
    const auto* const ours = dynamic_cast<const GradReadyHook*>(hook);
    const auto listener = ours ? ours->listener.lock() : nullptr;
    if (!ours || (listener && listener->waits_for_whole())) return true;
    hook = ours->before.get();
  }
  return false;
}

GRADACCUM_INLINE void say_added(const at::Tensor& parameter) {
  const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
  while (const auto* const ours = dynamic_cast<const GradReadyHook*>(hook)) {
    if (const auto listener = ours->listener.lock()) listener->grad_ready(ours->place);
    hook = ours->before.get();
  }
}

/// The gradients that a backward pass has computed so far. Steps their parameters, and frees them.
///
/// Backward runs a thread for each device, which may have several streams: gradients that wait to be stepped together
/// wait on their own stream.
class ArrivingGradients final : public GradReadyListener {
 public:
  ArrivingGradients(std::shared_ptr<WindowGradients> window, std::optional<at::ScalarType> accumulate_in,
                    const StepOfSome& step)
      : window_(std::move(window)),
        parameters_(window_->all_parameters()),
        arrived_(parameters_.size()),
        accumulate_in_(accumulate_in),
        step_(step) {}

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }

  void grad_ready(std::size_t place) override {
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
