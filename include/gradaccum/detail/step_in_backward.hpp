// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/arriving_gradients.hpp>
#include <gradaccum/detail/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Says that a parameter's gradient is there, after whatever else listened for that.
class ArrivalHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(std::shared_ptr<ArrivingGradients> gradients, std::size_t place)
      : gradients_(std::move(gradients)), place_(place) {}

  void operator()(const at::Tensor& parameter) override {
    if (before_) (*before_)(parameter);
    const auto gradients = gradients_;  // may outlive the hook
    gradients->arrive(place_);
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
  std::shared_ptr<ArrivingGradients> gradients_;
  std::size_t place_;
  Slot before_;
};

/// A scope around a backward pass, in which the parameters of a window are stepped as their gradients arrive.
class SteppingScope {
 public:
  explicit SteppingScope(std::shared_ptr<ArrivingGradients> gradients) : gradients_(std::move(gradients)) {
    std::vector<std::pair<const at::Tensor*, std::unique_ptr<ArrivalHook>>> hooks;
    const auto& parameters = gradients_->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (parameters[i].requires_grad())
        hooks.emplace_back(&parameters[i], std::make_unique<ArrivalHook>(gradients_, i));
    for (auto& [parameter, hook] : hooks) listening_.push_back(parameter);
    for (auto& [parameter, hook] : hooks) ArrivalHook::install(std::move(hook), slot(*parameter));
  }
  SteppingScope(const SteppingScope&) = delete;
  SteppingScope& operator=(const SteppingScope&) = delete;
  ~SteppingScope() {
    gradients_->end();
    for (auto* const parameter : listening_) ArrivalHook::remove(slot(*parameter));
  }

 private:
  static ArrivalHook::Slot& slot(const at::Tensor& parameter) {
    return torch::autograd::impl::post_acc_grad_hooks(parameter);
  }

  std::shared_ptr<ArrivingGradients> gradients_;
  std::vector<const at::Tensor*> listening_;
};

inline constexpr const char* stepped_in_part =
    "an exception came when backward had stepped some of the parameters, and not the others; load a saved state, or "
    "discard() the window and go on from here";

/// Runs `backward`, and steps the parameters of `window` on the way. Its factor and its weights are complete.
template <class Backward>
void step_in_backward(const std::shared_ptr<WindowGradients>& window, std::optional<at::ScalarType> accumulate_in,
                      const StepOfSome& step, const Backward& backward) {
  const auto gradients = std::make_shared<ArrivingGradients>(window, accumulate_in, step);
  try {
    const SteppingScope scope(gradients);
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
