// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: window

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

namespace gradaccum {

/// Options of a `GradAccumulator`.
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
/// With `in_backward` the backward pass that fills the window updates each parameter as soon as its gradient is
/// complete, after other hooks on it, and frees the gradient. With windows of one micro-batch, AdamW then takes 12
/// bytes per parameter instead of 16. Results are bitwise the same. Parameters that this pass does not reach, and
/// flushed windows, are updated when the window closes.
///
/// It needs an optimizer that takes gradients (`ga::optim`), and `optimizer.backward(loss)`, with the learning rate set
/// before. Clipping, a loss scaler and `create_graph` throw before any update. Reading gradients of a full window, and
/// a second gradient of a parameter in one pass, throw afterwards.
///
/// @note Does not synchronize. Parameters are updated about 65'000 elements at a time, so small ones wait for others.
/// After an exception in the backward pass some parameters have been updated, which only a saved state undoes, not
/// `discard()`. A checkpointed block that reads a parameter without a gradient (`detach()`, a comparison) may read its
/// updated value when it is recomputed.
struct GradAccumulatorOptions {
  Count steps = 1;                                   ///< micro-batches per update, >= 1
  std::optional<at::ScalarType> accumulate_in = {};  ///< kFloat: sum 16-bit gradients in float32, 4 bytes each
  bool in_backward = false;  ///< update parameters in the backward pass that fills the window, and free gradients
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
  /// Moves an accumulator, for functions that return one. Throws inside a window, and if a reference to it as a
  /// `torch::optim::Optimizer` was taken. The source cannot be used afterwards.
  Accumulator(Accumulator&& other);

  /// Runs backward with the loss's weight, so that the window is the mean over all its items. Call it once per
  /// micro-batch; a weight of 0 counts, without backward. Must not be mixed with `loss.backward()` in one window.
  void backward(Loss loss, std::optional<bool> retain_graph = {}, bool create_graph = false);
  /// Runs backward for some parameters only: `optimizer.backward(loss, {.inputs = generator->parameters()})`.
  void backward(Loss loss, const BackwardOptions& options);

  /// Completes a micro-batch, and closes the window after its last one. The result converts to true after an update.
  StepResult step();
  /// Calls `closure()`, which runs backward, then `step()`. Returns the closure's loss.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure);

  /// Clears the gradients if and only if `micro_steps() == 0`, so it may stand first or last in a loop. Throws inside a
  /// window if its gradients were added to since `step()`.
  void zero_grad(bool set_to_none = true);

  /// Closes an incomplete window, with the mean over its items, and clears the gradients. Does nothing if it is empty.
  StepResult flush();

  /// Discards the window, and clears the gradients.
  void discard();

  /// Clips the window to this L2 norm when `step` or `flush` closes it, so it may be called at every micro-batch.
  /// `max_norm` is > 0; if it is infinite, the norm is only measured.
  void clip_grad_norm_(double max_norm);
  /// Clamps the elements to [-clip_value, clip_value] when the window closes, after the norm if that is clipped, too.
  void clip_grad_value_(double clip_value);
  /// Returns the last closed window's norm before clipping: 0-dim float64, on the device. Throws if it was not clipped.
  const at::Tensor& grad_norm() const;

  /// Returns the current window. Its values may be read and changed if `ready()`, after backward.
  Gradients gradients();

  /// The window as a part of a training state, between two micro-batches; see `OptimizerState`.
  struct NamedWindow {
    Accumulator& of;
    const torch::nn::Module& module;
    void state(Archive& archive);
  };
  NamedWindow named_window(const torch::nn::Module& module);

  bool ready() const;                  ///< true if the next `step()` closes the window
  std::int64_t micro_steps() const;    ///< micro-batches completed in this window
  std::int64_t updates() const;        ///< number of updates, including steps that were left to a device
  void set_steps(std::int64_t steps);  ///< takes effect from the next window on
  bool others_continue();

  /// Returns `Wrapping 'SGD' optimizer with gradient accumulation of 4 steps`, for example.
  std::string description() const;

 protected:
  Accumulator(std::unique_ptr<detail::AnyOptimizer> optimizer, const GradAccumulatorOptions& options);
  ~Accumulator();

  /// Passes options and groups that were set through a `torch::optim::Optimizer&` to the wrapped optimizer.
  void synchronize() const;
  void check_can_be_saved() const;
  torch::optim::Optimizer& facade_of(torch::optim::Optimizer& wrapped);

 private:
  friend struct FitMemory;
  friend class Replicas;
  template <class Optimizer>
  friend class OptimizerState;

  /// Locks the accumulator for a call; throws if another thread is in one. With `begins`, also throws if another thread
  /// has a pending micro-batch.
  std::unique_lock<std::recursive_mutex> turn(bool begins);
  void check_can_clip() const;
  /// Sums each window over these ranks when it closes.
  void set_peers(std::shared_ptr<detail::Communicator> peers);
  /// Returns the shards of the optimizer's state; nullptr if it is not sharded.
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

/// A drop-in for the optimizer it wraps, which updates the parameters on every `steps`-th call of `step()`.
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
/// Gradients are the mean over the window, as of one large batch, also for an incomplete last window. `.grad` holds the
/// sum until the window closes: to clip, call `optimizer.clip_grad_norm_`, and put other code that reads gradients into
/// `if (optimizer.ready()) { optimizer.gradients().apply(); … }`, after backward.
///
/// A micro-batch is one `backward()` of the accumulator, or one `step()` without it. An accumulator converts to a
/// `torch::optim::Optimizer&`, which LibTorch's schedulers take.
///
/// The wrapped optimizer must outlive the accumulator. It keeps its options, state and saved files.
///
/// Threads take turns: a thread uses the accumulator alone from its backward to `zero_grad()`, and others throw.
///
/// @note Does not synchronize, except for a 4-byte read per window with a loss scaler.
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
  static_assert(is_pointer || gradaccum::optimizer<Optimizer> || std::derived_from<Optimizer, torch::optim::LBFGS>,
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
  decltype(auto) param_groups() { return optimizer().param_groups(); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { optimizer().add_param_group(group); }

  /// Converts to LibTorch's base class, for code that takes an optimizer by reference. Its `step` counts micro-batches,
  /// updates and then clears; its `zero_grad` does not change a window. Options (of custom classes, the learning rate)
  /// and groups that are set through it, and save and load, reach the wrapped optimizer. Its `state()` is empty: use
  /// `optimizer()`. Windows that it steps keep their sums separate from `.grad`, which takes 4 bytes per parameter in
  /// float32. Saving throws inside a window.
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
  /// Saves the wrapped optimizer. `torch::save` and `torch::load` call these functions.
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
