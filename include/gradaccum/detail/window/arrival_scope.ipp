// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/arrival_scope.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace gradaccum::detail {

/// Calls the listener after the hook that was in the slot. The scope owns the listener, which may hold the parameter.
struct ArrivalHook final : torch::autograd::PostAccumulateGradHook {
  ArrivalHook(const std::shared_ptr<ArrivalListener>& whom, std::size_t where)
      : listener(whom), address(whom.get()), place(where) {}

  void operator()(const at::Tensor& parameter) override {
    const auto there = listener.lock();  // keeps the listener alive during the calls
    if (there) there->added(place);
    if (before) (*before)(parameter);
    if (there) there->arrive(place);
  }

  std::weak_ptr<ArrivalListener> listener;
  const ArrivalListener* address;
  std::size_t place;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> before;
};

GRADACCUM_INLINE ArrivalScope::ArrivalScope(std::shared_ptr<ArrivalListener> listener)
    : listener_(std::move(listener)) {
  std::vector<std::pair<const at::Tensor*, std::unique_ptr<ArrivalHook>>> hooks;
  const auto& parameters = listener_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad()) hooks.emplace_back(&parameters[i], std::make_unique<ArrivalHook>(listener_, i));
  for (auto& [parameter, hook] : hooks) listening_.push_back(parameter);
  for (auto& [parameter, hook] : hooks) {
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(*parameter);
    hook->before = std::move(slot);
    slot = std::move(hook);
  }
}

/// Takes a listener's hook out of the chain, since scopes may end in any order.
GRADACCUM_INLINE void take_out(std::unique_ptr<torch::autograd::PostAccumulateGradHook>& slot,
                               const ArrivalListener& listener) {
  auto* const hook = dynamic_cast<ArrivalHook*>(slot.get());
  if (!hook) return;
  if (hook->address != &listener) return take_out(hook->before, listener);
  auto before = std::move(hook->before);
  slot = std::move(before);
}

GRADACCUM_INLINE ArrivalScope::~ArrivalScope() {
  listener_->end();
  for (auto* const parameter : listening_) take_out(torch::autograd::impl::post_acc_grad_hooks(*parameter), *listener_);
}

GRADACCUM_INLINE bool is_waited_for(const at::Tensor& parameter) {
  const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
  while (hook) {
    const auto* const ours = dynamic_cast<const ArrivalHook*>(hook);
    const auto listener = ours ? ours->listener.lock() : nullptr;
    if (!ours || (listener && listener->waits_for_whole())) return true;
    hook = ours->before.get();
  }
  return false;
}

GRADACCUM_INLINE void say_added(const at::Tensor& parameter) {
  const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
  while (const auto* const ours = dynamic_cast<const ArrivalHook*>(hook)) {
    if (const auto listener = ours->listener.lock()) listener->arrive(ours->place);
    hook = ours->before.get();
  }
}

}  // namespace gradaccum::detail
