// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/clip_grad.hpp>
#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/grad_accumulator_options.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

namespace gradaccum {

struct FitMemory;

namespace detail {
class OpenWindow;
class OptimizerFacade;
class Peers;
class Shards;
}  // namespace detail

/// An accumulator of whatever optimizer: all of `GradAccumulator` that does not name the optimizer's class.
class Accumulator {
 public:
  Accumulator(const Accumulator&) = delete;  // an accumulator is neither copied nor wrapped by another
  Accumulator& operator=(const Accumulator&) = delete;
  /// For functions that make one. Throws in the middle of a window, and where somebody has a reference to it as a
  /// `torch::optim::Optimizer`. What is left cannot be used.
  Accumulator(Accumulator&& other);

  /// Runs backward with the loss's weight: the window is then the mean over all its items. Once a micro-batch; weight 0
  /// counts, without backward. Must not be mixed with `loss.backward()` in one window.
  void backward(Loss loss, std::optional<bool> retain_graph = {}, bool create_graph = false);
  /// The same for some parameters alone: `optimizer.backward(loss, {.inputs = generator->parameters()})`.
  void backward(Loss loss, const BackwardOptions& options);

  /// Completes a micro-batch, and closes the window if it was the last. As a `bool`: whether the parameters moved.
  StepResult step();
  /// The same after `closure()`, which runs backward. Gives its loss.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure);

  /// Clears the gradients if and only if `micro_steps() == 0`: it may stand first or last in a loop. Throws in the
  /// middle of a window whose gradients somebody has added to since `step()`.
  void zero_grad(bool set_to_none = true);

  /// Closes a shorter window, with its true mean, and clears the gradients. Does nothing where the window is empty.
  StepResult flush();

  /// Forgets the window, and clears the gradients.
  void discard();

  /// The window is clipped to this L2 norm when it closes, by step or flush; so it may be called at every micro-batch.
  /// `max_norm` is > 0; infinity only measures.
  void clip_grad_norm_(double max_norm);
  /// The same for the elements, to [-clip_value, clip_value]; after the norm, where both are asked for.
  void clip_grad_value_(double clip_value);
  /// The norm of the last closed window before clipping: 0-dim float64, on the device. It must have been clipped.
  const at::Tensor& grad_norm() const;

  /// The window so far. Its values may be read and changed when all its micro-batches are in: if `ready()`, after
  /// backward.
  Gradients gradients();

  /// The window as a part of a training state, between two micro-batches; see `OptimizerState`.
  struct NamedWindow {
    Accumulator& of;
    const torch::nn::Module& module;
    void state(Archive& archive);
  };
  NamedWindow named_window(const torch::nn::Module& module);

  bool ready() const;                  ///< the next `step()` closes the window
  std::int64_t micro_steps() const;    ///< completed in this window
  std::int64_t updates() const;        ///< how often the parameters have moved
  void set_steps(std::int64_t steps);  ///< from the next window on
  /// For `Replicas`: each window becomes that of all processes when it closes.
  void set_peers(std::shared_ptr<detail::Peers> peers);
  bool others_continue();
  /// Where they have divided the optimizer's state; else none.
  std::shared_ptr<detail::Shards> shards() const;

  /// `Wrapping 'SGD' optimizer with gradient accumulation of 4 steps`
  std::string description() const;

 protected:
  Accumulator(std::unique_ptr<detail::AnyOptimizer> optimizer, const GradAccumulatorOptions& options);
  ~Accumulator();

  /// What was set through a reference to it as a `torch::optim::Optimizer` reaches the wrapped one.
  void synchronise() const;
  void check_can_be_saved() const;
  torch::optim::Optimizer& facade_of(torch::optim::Optimizer& wrapped);

 private:
  friend struct FitMemory;

  std::unique_ptr<detail::OpenWindow> given_away();
  void check_can_clip() const;
  void follow();
  /// Clips the window that is to be closed, where that was asked for.
  void clip();
  StepResult counted(StepResult result);

  std::unique_ptr<detail::OpenWindow> window_;
  std::unique_ptr<detail::OptimizerFacade> facade_;
  std::int64_t updates_ = 0;
  std::optional<double> clip_norm_, clip_value_;
  at::Tensor grad_norm_;
};

namespace detail {
void check_can_be_accumulated(const torch::optim::Optimizer& optimizer);
}

/// A drop-in for the optimizer it wraps, that moves the parameters on every `steps`-th call of `step()`.
///
///     ga::GradAccumulator optimizer(sgd, {.steps = 4});
///     for (auto& batch : batches) {
///       auto loss = torch::mse_loss(model->forward(batch.data), batch.target);
///       loss.backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     optimizer.flush();
///
/// Gradients are the mean over the window, as of one large batch; of a shorter, last window too. `.grad` holds the sum
/// until the window closes: a loop that clips calls `optimizer.clip_grad_norm_`, and other code that reads gradients
/// goes inside `if (optimizer.ready()) { optimizer.gradients().apply(); … }`, after backward.
///
/// A micro-batch is one `backward()` of the accumulator, or one `step()` that none preceded. Where a
/// `torch::optim::Optimizer&` is asked for (LibTorch's schedulers), an accumulator converts to one.
///
/// The wrapped optimizer outlives the accumulator. Its options, state and saved files are its own, untouched.
///
/// @note Does not wait for the device, apart from a 4-byte read a window where a loss scaler is at work.
template <class Optimizer>
class GradAccumulator : public Accumulator {
  static_assert(!accumulating<Optimizer>,
                "GradAccumulator: wraps an optimizer, not another accumulator; set_steps(n) changes its window");
  static_assert(!std::derived_from<Optimizer, torch::optim::LBFGS>,
                "GradAccumulator: LBFGS calls its closure several times a step, so it has no micro-batches; "
                "use SGD, Adam, AdamW, RMSprop, Adagrad or one of your own");
  static constexpr bool is_pointer = requires(Optimizer & given) {
    { given == nullptr } -> std::convertible_to<bool>;
    *given;
  };
  static_assert(!is_pointer, "GradAccumulator: wraps an optimizer by reference, not a pointer to one: pass *optimizer");
  static_assert(is_pointer || gradaccum::optimizer<Optimizer> || accumulating<Optimizer> ||
                    std::derived_from<Optimizer, torch::optim::LBFGS>,
                "GradAccumulator: an optimizer has step(), zero_grad() and param_groups()");

 public:
  explicit GradAccumulator(Optimizer& optimizer, GradAccumulatorOptions options = {})
      : Accumulator(std::make_unique<detail::OptimizerOf<Optimizer>>(checked(optimizer)), options),
        optimizer_(optimizer) {}
  template <std::integral Steps>
  GradAccumulator(Optimizer& optimizer, Steps) : GradAccumulator(optimizer) {
    static_assert(!std::integral<Steps>, "GradAccumulator: say what the number is: {.steps = 4}");
  }

  Optimizer& optimizer() {
    synchronise();
    return optimizer_;
  }
  auto& param_groups() { return optimizer().param_groups(); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { optimizer().add_param_group(group); }

  /// For code that takes an optimizer by reference: its groups have the parameters; its `step` counts, steps and then
  /// clears; its `zero_grad` takes nothing from a window; options (of a class of your own the learning rate) and groups
  /// that are set through it, save and load reach the wrapped optimizer. Its `state()` is empty: ask `optimizer()`.
  /// Windows that are stepped by it keep their sums apart from `.grad`, 4 bytes a parameter in float32. Saving throws
  /// in the middle of a window.
  operator torch::optim::Optimizer&()  // NOLINT(google-explicit-constructor): a drop-in
      requires std::derived_from<Optimizer, torch::optim::Optimizer> {
    return facade_of(optimizer_);
  }
  operator const torch::optim::Optimizer&() const  // NOLINT(google-explicit-constructor): torch::save
      requires std::derived_from<Optimizer, torch::optim::Optimizer> {
    check_can_be_saved();
    synchronise();
    return optimizer_;
  }

 private:
  static Optimizer& checked(Optimizer& optimizer) {
    if constexpr (std::derived_from<Optimizer, torch::optim::Optimizer>) detail::check_can_be_accumulated(optimizer);
    return optimizer;
  }

  Optimizer& optimizer_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/grad_accumulator.ipp>
#endif
