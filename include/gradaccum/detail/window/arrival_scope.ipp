// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/arrival_scope.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace gradaccum::detail {

/// Says that a parameter's gradient is there.
class ArrivalHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  using Slot = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

  ArrivalHook(std::shared_ptr<ArrivalListener> listener, std::size_t place)
      : listener_(std::move(listener)), place_(place) {}

  void operator()(const at::Tensor& parameter) override {
    if (before_) (*before_)(parameter);
    const auto listener = listener_;  // may outlive the hook
    listener->arrive(place_);
  }

  static Slot& slot(const at::Tensor& parameter) { return torch::autograd::impl::post_acc_grad_hooks(parameter); }
  static void install(std::unique_ptr<ArrivalHook> hook, Slot& slot) {
    hook->before_ = std::move(slot);
    slot = std::move(hook);
  }
  static void remove(Slot& slot) {
    if (auto* const ours = dynamic_cast<ArrivalHook*>(slot.get())) slot = std::move(ours->before_);
  }

 private:
  std::shared_ptr<ArrivalListener> listener_;
  std::size_t place_;
  Slot before_;
};

GRADACCUM_INLINE ArrivalScope::ArrivalScope(std::shared_ptr<ArrivalListener> listener)
    : listener_(std::move(listener)) {
  std::vector<std::pair<const at::Tensor*, std::unique_ptr<ArrivalHook>>> hooks;
  const auto& parameters = listener_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad()) hooks.emplace_back(&parameters[i], std::make_unique<ArrivalHook>(listener_, i));
  for (auto& [parameter, hook] : hooks) listening_.push_back(parameter);
  for (auto& [parameter, hook] : hooks) ArrivalHook::install(std::move(hook), ArrivalHook::slot(*parameter));
}

GRADACCUM_INLINE ArrivalScope::~ArrivalScope() {
  listener_->end();
  for (auto* const parameter : listening_) ArrivalHook::remove(ArrivalHook::slot(*parameter));
}

}  // namespace gradaccum::detail
