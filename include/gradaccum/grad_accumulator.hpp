// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/ScalarType.h>
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

namespace gradaccum {

/// Options of an accumulator: how it gathers gradients, and when it steps.
///
///     ga::optim::AdamW adamw(model->parameters(), 1e-3);
///     ga::GradAccumulator optimizer(adamw, {.steps = 4, .in_backward = true});
///     for (auto& batch : batches) {
///       optimizer.backward(torch::mse_loss(model->forward(batch.data), batch.target));  // the 4th moves them
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     optimizer.flush();
///
/// With `in_backward` the backward that fills the window steps each parameter as soon as its gradient is there, after
/// other hooks on it, and frees the gradient. Windows of one micro-batch then hold one gradient at a time: 12 bytes a
/// parameter for AdamW in place of 16. The parameters equal those of the ordinary step, to the bit. Parameters that
/// this backward does not reach, and a flushed window, are stepped when the window closes.
///
/// That needs an optimizer that takes gradients (`ga::optim`), and `optimizer.backward(loss)`, with the learning rate
/// set before. Clipping, a loss scaler and `create_graph` are errors before anything moves. Reading the gradients of a
/// full window, and a gradient that arrives twice in one pass, are errors afterwards. After an exception in that
/// backward some parameters have moved: only a saved state restores them, `discard()` does not. If a checkpointed block
/// reads a parameter without a gradient (`detach()`, a comparison), it may have moved when the block is recomputed.
///
/// @note Parameters are stepped some 65'000 elements at a time, so small ones wait for each other. Does not
/// synchronize.
struct GradAccumulatorOptions {
  Count steps = 1;                                   ///< micro-batches an update, >= 1
  std::optional<at::ScalarType> accumulate_in = {};  ///< kFloat: sums 16-bit gradients in float32, 4 bytes each
  bool in_backward = false;  ///< the backward that fills the window steps each parameter, and frees its gradient
};

struct FitMemory;
class Replicas;

namespace detail {
class OpenWindow;
class OptimizerFacade;
class Communicator;
class Shards;
}  // namespace detail

/// The part of `GradAccumulator` that does not depend on the optimizer's class.
class Accumulator {
 public:
  Accumulator(const Accumulator&) = delete;  // an accumulator is neither copied nor wrapped by another
  /// For functions that return an accumulator. Throws inside a window, and if code has a reference to it as a
  /// `torch::optim::Optimizer`. The source cannot be used afterwards.
  Accumulator(Accumulator&& other);

  /// Runs backward with the loss's weight, so that the window is the mean over all its items. Called once a
  /// micro-batch; a weight of 0 counts, without backward. Must not be mixed with `loss.backward()` in one window.
  void backward(Loss loss, std::optional<bool> retain_graph = {}, bool create_graph = false);
  /// Runs backward for some parameters alone: `optimizer.backward(loss, {.inputs = generator->parameters()})`.
  void backward(Loss loss, const BackwardOptions& options);

  /// Completes a micro-batch, and closes the window after its last one. As a `bool`: true if the parameters moved.
  StepResult step();
  /// Calls `closure()`, which runs backward, then `step()`. Returns the closure's loss.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure);

  /// Clears the gradients if and only if `micro_steps() == 0`, so it may stand first or last in a loop. Throws inside a
  /// window if its gradients were added to since `step()`.
  void zero_grad(bool set_to_none = true);

  /// Closes a shorter window, with its true mean, and clears the gradients. Does nothing if the window is empty.
  StepResult flush();

  /// Discards the window, and clears the gradients.
  void discard();

  /// Clips the window to this L2 norm when it closes, by step or flush, so it may be called at every micro-batch.
  /// `max_norm` is > 0; infinity only measures.
  void clip_grad_norm_(double max_norm);
  /// Clamps the elements to [-clip_value, clip_value] when the window closes, after the norm if that is clipped, too.
  void clip_grad_value_(double clip_value);
  /// The norm of the last closed window before clipping: 0-dim float64, on the device. Throws if it was not clipped.
  const at::Tensor& grad_norm() const;

  /// The window so far. Its values may be read and changed if `ready()`, after backward: all its micro-batches are in.
  Gradients gradients();

  /// The window as a part of a training state, between two micro-batches; see `OptimizerState`.
  struct NamedWindow {
    Accumulator& of;
    const torch::nn::Module& module;
    void state(Archive& archive);
  };
  NamedWindow named_window(const torch::nn::Module& module);

  bool ready() const;                  ///< the next `step()` closes the window
  std::int64_t micro_steps() const;    ///< micro-batches completed in this window
  std::int64_t updates() const;        ///< the number of steps that moved the parameters, or were left to a device
  void set_steps(std::int64_t steps);  ///< from the next window on
  bool others_continue();

  /// `Wrapping 'SGD' optimizer with gradient accumulation of 4 steps`
  std::string description() const;

 protected:
  Accumulator(std::unique_ptr<detail::AnyOptimizer> optimizer, const GradAccumulatorOptions& options);
  ~Accumulator();

  /// Passes on to the wrapped optimizer what was set through a `torch::optim::Optimizer&`.
  void synchronize() const;
  void check_can_be_saved() const;
  torch::optim::Optimizer& facade_of(torch::optim::Optimizer& wrapped);

 private:
  friend struct FitMemory;
  friend class Replicas;
  template <class Optimizer>
  friend class OptimizerState;

  /// Keeps other threads out of a call, by an error. `begins`: also where a micro-batch of another thread is in hand.
  std::unique_lock<std::recursive_mutex> turn(bool begins);
  void check_can_clip() const;
  /// Sums each window over these processes when it closes.
  void set_peers(std::shared_ptr<detail::Communicator> peers);
  /// The shards of the optimizer's state; nullptr if it is not sharded.
  std::shared_ptr<detail::Shards> shards() const;
  void refresh_parameters();
  /// Clips the window, if requested, and steps with it.
  StepResult close();
  void clip();

  std::unique_ptr<detail::OpenWindow> window_;
  std::unique_ptr<detail::OptimizerFacade> facade_;
  bool cleared_ = false, stepped_ = false;  // zero_grad() and step() were called
  bool warned_of_nothing_ = false;
  std::int64_t updates_ = 0;
  std::optional<double> clip_norm_, clip_value_;
  at::Tensor grad_norm_;
  std::recursive_mutex turn_;
  std::thread::id in_hand_of_;  // the thread between its backward and its step, if any
};

/// A drop-in for the optimizer it wraps, which moves the parameters on every `steps`-th call of `step()`.
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
/// Gradients are the mean over the window, as of one large batch, also for a shorter, last window. `.grad` holds the
/// sum until the window closes: a loop that clips calls `optimizer.clip_grad_norm_`, and other code that reads
/// gradients goes inside `if (optimizer.ready()) { optimizer.gradients().apply(); … }`, after backward.
///
/// A micro-batch is one `backward()` of the accumulator, or one `step()` without it. An accumulator converts to a
/// `torch::optim::Optimizer&`, as LibTorch's schedulers take it.
///
/// The wrapped optimizer must outlive the accumulator. Its options, state and saved files stay its own.
///
/// Threads take turns: each holds one lock from its backward to `zero_grad()`. Two at once are an error.
///
/// @note Does not synchronize, apart from a 4-byte read a window with a loss scaler.
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
      : Accumulator(std::make_unique<detail::OptimizerOf<Optimizer>>(optimizer), options), optimizer_(optimizer) {}
  template <std::integral Steps>
  GradAccumulator(Optimizer& optimizer, Steps) : GradAccumulator(optimizer) {
    static_assert(!std::integral<Steps>, "GradAccumulator: say what the number is: {.steps = 4}");
  }

  Optimizer& optimizer() {
    synchronize();
    return optimizer_;
  }
  auto& param_groups() { return optimizer().param_groups(); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { optimizer().add_param_group(group); }

  /// For code that takes an optimizer by reference. Its groups have the parameters; its `step` counts, steps and then
  /// clears; its `zero_grad` takes nothing from a window. Options (of a user-made class, the learning rate) and groups
  /// that are set through it, save and load reach the wrapped optimizer. Its `state()` is empty: use `optimizer()`.
  /// Windows that it steps keep their sums apart from `.grad`, 4 bytes a parameter in float32. Saving throws inside a
  /// window.
  operator torch::optim::Optimizer&()  // NOLINT(google-explicit-constructor): a drop-in
      requires std::derived_from<Optimizer, torch::optim::Optimizer> {
    return facade_of(optimizer_);
  }
  operator const torch::optim::Optimizer&() const  // NOLINT(google-explicit-constructor): torch::save
      requires std::derived_from<Optimizer, torch::optim::Optimizer> {
    check_can_be_saved();
    synchronize();
    return optimizer_;
  }
  /// Calls the functions of the wrapped optimizer, as `torch::save` and `torch::load` call them.
  void save(torch::serialize::OutputArchive& archive) const {
    static_cast<const torch::optim::Optimizer&>(*this).save(archive);
  }
  void load(torch::serialize::InputArchive& archive) { static_cast<torch::optim::Optimizer&>(*this).load(archive); }

 private:
  Optimizer& optimizer_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/grad_accumulator.ipp>
#endif
