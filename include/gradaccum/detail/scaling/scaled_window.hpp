// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <optional>
#include <type_traits>
#include <vector>

namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

namespace gradaccum::detail {

/// What a window says about the scale; of several the last one here counts.
enum class Verdict { none, clean, overflow };

/// One optimizer's window, as a loss scaler sees it: its gradients have the scale still in them, until it is unscaled
/// or closed.
struct ScaledWindow {
  enum class Stage { ready, unscaled, stepped };

  Stage stage = Stage::ready;
  std::optional<Gradients> gradients = {};  ///< none: the scaler has not met this window yet
  std::function<void()> end = {};           ///< closes it: by `discard()`, where it is an accumulator's
  bool of_accumulator = false;

  bool closed() const { return !gradients || gradients->closed(); }
  bool open() const { return of_accumulator && !closed(); }
  Verdict verdict();
  /// The verdict, where the host need not know it; else undefined.
  at::Tensor found_inf_on_device() const;
};

/// A window of a single batch: of an optimizer that is no accumulator.
ScaledWindow window_of_one_batch(const std::vector<at::Tensor>& parameters);

/// An optimizer of whatever class, as a loss scaler sees it: an accumulator, which has a window open, or any other.
class Scalable {
 public:
  virtual ~Scalable() = default;
  virtual const void* address() const = 0;  ///< the same through a reference to any of its base classes
  virtual std::vector<at::Tensor> parameters() const = 0;
  virtual bool accumulates() const = 0;
  virtual bool ready() const = 0;           ///< an accumulator's window is full with the next step
  virtual ScaledWindow window() const = 0;  ///< that it has open
  virtual bool step() const = 0;            ///< without a scale

  virtual bool step(const Gradients& of_one_batch) const = 0;
};

template <class O>
class ScalableOf final : public Scalable {
 public:
  explicit ScalableOf(O& optimizer) : optimizer_(optimizer) {}

  const void* address() const override {
    if constexpr (std::is_polymorphic_v<O>)
      return dynamic_cast<const void*>(&optimizer_);
    else
      return &optimizer_;
  }
  std::vector<at::Tensor> parameters() const override { return parameters_of(optimizer_); }
  bool accumulates() const override { return accumulating<O>; }
  bool ready() const override {
    if constexpr (accumulating<O>) return optimizer_.ready();
    return true;
  }
  ScaledWindow window() const override {
    if constexpr (accumulating<O>)
      return {.gradients = optimizer_.gradients(), .end = [&o = optimizer_] { o.discard(); }, .of_accumulator = true};
    else
      return window_of_one_batch(parameters());
  }
  bool step() const override {
    if constexpr (accumulating<O>)
      return optimizer_.step();
    else
      return step(Gradients(parameters()));
  }
  bool step(const Gradients& of_one_batch) const override {
    OptimizerOf<O> plain(optimizer_);
    return take_step(plain, of_one_batch);
  }

 private:
  O& optimizer_;
};

/// What a reference can hide, and a type would have told the compiler.
void check_nothing_hides_behind(const torch::optim::Optimizer& optimizer);

template <class Optimizer>
ScalableOf<Optimizer> scalable(Optimizer& optimizer) {
  static_assert(!std::derived_from<Optimizer, torch::optim::LBFGS>,
                "AmpScaler: LBFGS calls its closure several times a step, each with gradients of its own; use SGD, "
                "Adam, AdamW, RMSprop, Adagrad or one of your own");
  static_assert(gradaccum::optimizer<Optimizer> || std::derived_from<Optimizer, torch::optim::LBFGS>,
                "AmpScaler: an optimizer has step(), zero_grad() and param_groups()");
  if constexpr (std::derived_from<Optimizer, torch::optim::Optimizer>) check_nothing_hides_behind(optimizer);
  return ScalableOf<Optimizer>(optimizer);
}

/// The update itself would round away what the loss scale has saved.
void check_none_is_half(const std::vector<at::Tensor>& parameters);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/scaling/scaled_window.ipp>
#endif
