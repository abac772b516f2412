// SPDX-License-Identifier: Apache-2.0
// Calls listeners when backward has computed a gradient.
#pragma once

#include <gradaccum/detail/window/grad_ready_hooks.hpp>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Calls the listener after the hook that was in the slot. The scope owns the listener, which may hold the parameter.
struct GradReadyHook final : torch::autograd::PostAccumulateGradHook {
  GradReadyHook(const std::shared_ptr<GradReadyListener>& whom, std::size_t where) : listener(whom), place(where) {}

  void operator()(const at::Tensor& parameter) override {
    const auto there = listener.lock();  // keeps the listener alive during the calls
    if (there) there->added(place);
    if (before) (*before)(parameter);
    if (there) there->grad_ready(place);
  }

  std::weak_ptr<GradReadyListener> listener;
  std::size_t place;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> before;
};

GRADACCUM_INLINE GradReadyScope::GradReadyScope(std::shared_ptr<GradReadyListener> listener)
    : listener_(std::move(listener)) {
  std::vector<std::unique_ptr<GradReadyHook>> hooks;
  const auto& parameters = listener_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad()) hooks.push_back(std::make_unique<GradReadyHook>(listener_, i));
  for (auto& hook : hooks) {
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameters[hook->place]);
    hook->before = std::move(slot);
    slot = std::move(hook);
  }
}

/// Takes a listener's hook out of the chain, since scopes may end in any order.
GRADACCUM_INLINE void unhook(std::unique_ptr<torch::autograd::PostAccumulateGradHook>& slot,
                             const GradReadyListener& listener) {
  auto* const hook = dynamic_cast<GradReadyHook*>(slot.get());
  if (!hook) return;
  if (hook->listener.lock().get() != &listener) return unhook(hook->before, listener);
  auto before = std::move(hook->before);
  slot = std::move(before);
}

GRADACCUM_INLINE GradReadyScope::~GradReadyScope() {
  listener_->end();
  for (auto& parameter : listener_->parameters())
    if (auto* const meta = torch::autograd::impl::get_autograd_meta(parameter))
      unhook(meta->post_acc_grad_hooks_, *listener_);
}

/// Returns true if a listener, or another hook after the sum, needs whole gradients of this parameter.
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

GRADACCUM_INLINE bool has_no_hooks(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::grad_accumulator(parameter);
  return node->pre_hooks().empty() && node->post_hooks().empty() && node->tensor_pre_hooks().empty() &&
         !is_waited_for(parameter);
}

GRADACCUM_INLINE bool is_added_in_place(const at::Tensor& parameter, const at::Tensor& gradient) {
  const auto& sum = parameter.grad();
  if (at::GradMode::is_enabled() || !sum.defined() || sum.requires_grad()) return false;
  if (sum.layout() != at::kStrided || sum.dtype() != gradient.dtype() || sum.device() != gradient.device() ||
      sum.sizes() != parameter.sizes() || at::has_internal_overlap(sum) != at::MemOverlap::No)
    return false;
  const auto* const only_some = torch::autograd::get_current_graph_task_exec_info();
  if (only_some && !only_some->empty()) return false;  // autograd::grad, or backward for some inputs
  return has_no_hooks(parameter);
}

GRADACCUM_INLINE std::mutex& adding_in_place() {
  static std::mutex mutex;
  return mutex;
}

GRADACCUM_INLINE void say_added(const at::Tensor& parameter) {
  const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
  while (const auto* const ours = dynamic_cast<const GradReadyHook*>(hook)) {
    if (const auto listener = ours->listener.lock()) listener->grad_ready(ours->place);
    hook = ours->before.get();
  }
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
