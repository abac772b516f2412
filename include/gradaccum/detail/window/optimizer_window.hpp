// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/types/type_name.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/take_step.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

namespace gradaccum::detail {

/// The window of one optimizer: follows its parameters, clears their gradients, and closes with its step.
template <class Optimizer>
class OptimizerWindow : public OpenWindow {
 public:
  OptimizerWindow(Optimizer& optimizer, std::int64_t steps, std::optional<at::ScalarType> accumulate_in)
      : OpenWindow(steps, accumulate_in), optimizer_(&optimizer) {
    open();
  }

  /// Of as many micro-batches as its owner likes: `complete_early` makes it a complete one.
  explicit OptimizerWindow(Optimizer& optimizer) : OptimizerWindow(optimizer, no_limit, {}) {}

  Optimizer& optimizer() const { return *optimizer_; }

  /// Parameters may be added to the optimizer at any time.
  void follow() { OpenWindow::follow(parameters_of(*optimizer_)); }

  void set_in_backward(bool on) {
    if (!on) return set_step_in_backward({});
    constexpr bool takes_by_itself = takes_gradients<Optimizer>;
    TORCH_CHECK(takes_by_itself || as_takes_gradients(*optimizer_),
                "GradAccumulator: in_backward needs an optimizer that takes gradients: ga::optim::SGD, Adam, AdamW, or "
                "one of your own that derives from ga::TakesGradients; got ",
                type_name(*optimizer_));
    set_step_in_backward([this](Gradients some) { return take_step(*optimizer_, std::move(some)); });
  }

  /// Backward of a micro-batch, which is complete then. `fills`: so is the window.
  void add(Loss loss, bool fills) {
    follow();
    backward(std::move(loss), {}, false, fills);
    complete_micro_batch();
  }

  /// Clears the gradients: at a window's end, or of one in which no micro-batch is complete.
  void clear(bool set_to_none = true) {
    if constexpr (requires { optimizer_->zero_grad(set_to_none); })
      optimizer_->zero_grad(set_to_none);
    else
      optimizer_->zero_grad();
    cleared(parameters_of(*optimizer_));
  }

  /// Clears gradients that are there before the window has begun: they are of something else.
  void clear_others() {
    const auto parameters = parameters_of(*optimizer_);
    if (std::any_of(parameters.begin(), parameters.end(), [](auto& p) { return p.grad().defined(); })) clear();
  }

  /// See OpenWindow. What lies in the gradients of a window that is empty is of something else.
  bool others_continue() {
    follow();
    if (!has_weight()) clear_others();
    return OpenWindow::others_continue();
  }

  /// As a part of a training state, by the names that a model gives the parameters.
  struct Named {
    OptimizerWindow& window;
    NameOf name_of;
    void state(Archive& archive) {
      window.follow();
      window.OpenWindow::state(archive, name_of);
    }
  };
  Named named(const torch::nn::Module& module) { return {*this, NameOf(module.named_parameters())}; }

  void discard() {
    clear();
    open();
  }

  /// Steps with the window, which is complete, and opens the next. `prepare` gets its gradients first. True if the
  /// parameters moved; else the gradients are cleared.
  template <class Prepare>
  bool close(const Prepare& prepare) {
    bool moved = false;
    or_spoil([&] {
      Gradients gradients(closing());
      prepare(gradients);
      if (has_weight()) moved = take_step(*optimizer_, closing()->stepped() ? Gradients(closing()->rest()) : gradients);
      moved = moved || closing()->stepped();
    });
    open();
    if (!moved) clear();
    return moved;
  }

 private:
  static constexpr auto no_limit = std::numeric_limits<std::int64_t>::max();

  void open() { OpenWindow::open(parameters_of(*optimizer_)); }

  Optimizer* optimizer_;
};

}  // namespace gradaccum::detail
