// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Hears of gradients as a backward pass brings them. Each device has a thread of its own in backward.
class ArrivalListener {
 public:
  virtual ~ArrivalListener() = default;
  virtual const std::vector<at::Tensor>& parameters() const = 0;
  /// The gradient of this parameter is there.
  virtual void arrive(std::size_t place) = 0;
  /// What arrives from now on is left alone. (After an exception other threads may still be at it.)
  virtual void end() = 0;
};

/// Says that a parameter's gradient is there, after whatever else listened for that.
class ArrivalHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(std::shared_ptr<ArrivalListener> listener, std::size_t place)
      : listener_(std::move(listener)), place_(place) {}

  void operator()(const at::Tensor& parameter) override {
    if (before_) (*before_)(parameter);
    const auto listener = listener_;  // may outlive the hook
    listener->arrive(place_);
  }

  using Slot = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

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

/// A scope around a backward pass, in which somebody hears of the gradients as they arrive.
class ArrivalScope {
 public:
  explicit ArrivalScope(std::shared_ptr<ArrivalListener> listener) : listener_(std::move(listener)) {
    std::vector<std::pair<const at::Tensor*, std::unique_ptr<ArrivalHook>>> hooks;
    const auto& parameters = listener_->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (parameters[i].requires_grad())
        hooks.emplace_back(&parameters[i], std::make_unique<ArrivalHook>(listener_, i));
    for (auto& [parameter, hook] : hooks) listening_.push_back(parameter);
    for (auto& [parameter, hook] : hooks) ArrivalHook::install(std::move(hook), slot(*parameter));
  }
  ArrivalScope(const ArrivalScope&) = delete;
  ArrivalScope& operator=(const ArrivalScope&) = delete;
  ~ArrivalScope() {
    listener_->end();
    for (auto* const parameter : listening_) ArrivalHook::remove(slot(*parameter));
  }

 private:
  static ArrivalHook::Slot& slot(const at::Tensor& parameter) {
    return torch::autograd::impl::post_acc_grad_hooks(parameter);
  }

  std::shared_ptr<ArrivalListener> listener_;
  std::vector<const at::Tensor*> listening_;
};

}  // namespace gradaccum::detail
