// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace gradaccum::detail {

/// The window of one optimizer: follows its parameters, clears their gradients, and closes with its step.
class OptimizerWindow : public OpenWindow {
 public:
  OptimizerWindow(std::unique_ptr<AnyOptimizer> optimizer, std::int64_t steps,
                  std::optional<at::ScalarType> accumulate_in);
  /// Of as many micro-batches as its owner likes: `complete_early` makes it a complete one.
  explicit OptimizerWindow(std::unique_ptr<AnyOptimizer> optimizer);

  AnyOptimizer& optimizer() const { return *optimizer_; }

  /// Parameters may be added to the optimizer at any time.
  void follow() { OpenWindow::follow(optimizer_->parameters()); }
  void set_in_backward(bool on);
  void set_peers(std::shared_ptr<Peers> peers);

  /// Backward of a micro-batch, which is complete then. `fills`: so is the window.
  void add(Loss loss, bool fills);
  /// Clears the gradients: at a window's end, or of one in which no micro-batch is complete.
  void clear(bool set_to_none = true);
  /// Clears gradients that are there before the window has begun: they are of something else.
  void clear_others();
  /// See OpenWindow. What lies in the gradients of a window that is empty is of something else.
  bool others_continue();
  void discard();

  /// Steps with the window, which is complete, and opens the next. `prepare` gets its gradients first. Where the
  /// parameters do not move, the gradients are cleared.
  StepResult close(const std::function<void(Gradients&)>& prepare);

  /// As a part of a training state, by the names that a model gives the parameters.
  struct Named {
    OptimizerWindow& window;
    NameOf name_of;
    void state(Archive& archive);
  };
  Named named(const torch::nn::Module& module);

 private:
  void open() { OpenWindow::open(optimizer_->parameters()); }
  StepResult step(const Gradients& gradients);

  std::unique_ptr<AnyOptimizer> optimizer_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/optimizer_window.ipp>
#endif
