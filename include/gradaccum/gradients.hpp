// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

class AmpScaler;
namespace detail {
class CapturedSteps;
class StepGraphs;
struct Multiplier;
class WindowGradients;
}  // namespace detail

/// Collects the factors that gradients, or the seed of a backward pass, are still to be multiplied by.
///
///     ga::Gradients gradients(model->parameters());
///     torch::mse_loss(model->forward(x), y).mul(65536.0).backward();
///     gradients.factor().divide(65536.0);                  // the loss scale
///     gradients.factor().multiply(torch::tensor(0.5));     // a device tensor: does not synchronize
///     gradients.apply();                                   // one pass for all factors
///     sgd.step();
///
/// A factor is written but not read, so no writer depends on another, and any order of writers gives the same bits:
/// multipliers and divisors are kept apart, sorted before they are joined, and divided once.
///
/// @note Does not synchronize. A CPU tensor is read at once; a device tensor is copied on the device.
class Factor {
 public:
  void multiply(double by) { multipliers_.push_back(by); }
  void multiply(const at::Tensor& by);
  void divide(double by);
  void divide(const at::Tensor& by);

  /// Makes the step depend on every gradient being finite, for a loss scaler.
  void require_finite() { finiteness_ = std::max(finiteness_, Finiteness::required); }
  /// Like `require_finite()`, but lets an optimizer that can skip the step on the device do so: the host does not wait.
  void require_finite_on_device() { finiteness_ = std::max(finiteness_, Finiteness::required_on_device); }

  /// Returns the whole product, for code that applies it; a writer has no use for it.
  friend detail::Multiplier product_of(const Factor& factor);
  friend bool finite_required(const Factor& factor) { return factor.finiteness_ != Finiteness::any; }
  friend bool may_stay_on_device(const Factor& factor) { return factor.finiteness_ == Finiteness::required_on_device; }
  /// Returns a factor with the requirement alone, once the rest has been applied.
  friend Factor requirement_of(const Factor& factor);

 private:
  enum class Finiteness { any, required_on_device, required };

  friend class AmpScaler;
  friend class detail::WindowGradients;

  static bool on_host(const at::Tensor& by);
  /// Keeps a 0-dim float64 device tensor without a copy: nothing may change it.
  void multiply_by_own(at::Tensor by) { device_multipliers_.push_back(std::move(by)); }
  void divide_by_own(at::Tensor by) { device_divisors_.push_back(std::move(by)); }

  std::vector<double> multipliers_, divisors_;
  std::vector<at::Tensor> device_multipliers_, device_divisors_;
  Finiteness finiteness_ = Finiteness::any;
};

/// The gradients of one window, and the factor that they are still to be multiplied by.
///
///     ga::GradAccumulator optimizer(sgd, {.steps = 4});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       if (optimizer.ready())
///         for (auto& gradient : optimizer.gradients().values()) gradient.add_(torch::randn_like(gradient), 1e-3);
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// Loss scaling, clipping and the mean over a window and over ranks all multiply the same gradients. Here each is a
/// `factor()`, and all are applied in one pass: by an optimizer that takes `Gradients` inside its own, for any other by
/// `apply()` before its step.
///
/// A handle: copies refer to the same window, and are `closed()` with it. Made from a list of parameters, it is a
/// window of one batch. Parameters may be of any dtype, on several devices, shared or frozen; gradients may be dense,
/// sparse (COO) or undefined.
///
/// @note Only `overflowed()` synchronizes, apart from reading a returned tensor. (With parameters on the CPU
/// and on a device, a factor that is known only on the device is waited for.) With sharded parameters, norms and
/// overflows are exchanged with the other ranks.
class Gradients {
 public:
  explicit Gradients(const std::vector<at::Tensor>& parameters);

  /// The factor that all gradients are still to be multiplied by. Deferred, and write-only.
  Factor& factor();

  /// The sum of the weights of the window's micro-batches so far, on this rank; 1 for a micro-batch without a weight.
  double items() const;

  /// The parameters that have a gradient, in the order of `raw()` and `values()`.
  std::vector<at::Tensor> parameters() const;

  /// The gradients as they lie in memory, not multiplied yet: `.grad`, or the sums that are kept apart from it.
  /// For optimizers, which multiply by `multiplier(device)` themselves.
  std::vector<at::Tensor> raw() const;

  /// The `.grad` of each parameter in its true size, to be read and changed. Applies the factor first, and throws
  /// inside a window that is not complete.
  std::vector<at::Tensor> values();

  /// The number that `raw()` is still to be multiplied by, 0-dim float64: the factor and the mean over the window.
  at::Tensor multiplier(at::Device device) const;

  /// L2 norm of the gradients in their true size, 0-dim float64; duplicates in a sparse gradient count as their sum.
  /// Kept until a gradient changes.
  at::Tensor norm();

  /// The `norm()` before `clip_grad_norm_` clipped these gradients; undefined if they were not clipped.
  const at::Tensor& norm_before_clipping() const;
  /// For functions that clip.
  void set_norm_before_clipping(at::Tensor norm);

  /// Returns 1 if an element is inf or NaN, else 0: 0-dim float32. Finite numbers whose squares overflow are finite.
  at::Tensor found_inf();

  /// True if the step is to be taken only with finite gradients, as a loss scaler requires.
  bool finite_required() const;
  /// True if finite gradients are required and the optimizer may skip the step on the device, by `judge_on_device()`.
  bool may_be_judged_on_device() const;

  /// True if the step must be skipped: gradients are required to be finite, and are not. Reads 4 bytes from the device,
  /// and waits for them, on the first call in a window.
  bool overflowed();
  /// Returns `found_inf()`, for a step that the device skips by itself, in place of `overflowed()`.
  at::Tensor judge_on_device();
  /// True if `overflowed()` or `judge_on_device()` was called, so a step was about to be taken.
  bool judged() const;
  bool judged_on_device() const;  ///< by `judge_on_device()`, and the host has not read the result since

  /// Multiplies the gradients by the factor, and moves sums that are kept apart to `.grad`. A second call does nothing.
  void apply();

  /// True once the window was stepped, skipped or discarded. Then `items()` still answers, and so do `norm()` and
  /// `found_inf()` if they did before; the gradients no longer belong to the window.
  bool closed() const;

  /// Returns `multiplier` in its parts: the part that is known on the host needs no device.
  friend detail::Multiplier product_of(const Gradients& gradients);
  friend at::Tensor clip_grad_norm_(Gradients gradients, double max_norm);

 private:
  friend class AmpScaler;
  friend class detail::WindowGradients;

  explicit Gradients(std::shared_ptr<detail::WindowGradients> window) : window_(std::move(window)) {}

  std::shared_ptr<detail::WindowGradients> window_;
};

/// Options of a backward pass, as `torch::Tensor::backward` takes them.
struct BackwardOptions {
  std::optional<bool> retain_graph = {};  ///< keeps the graph for another pass; as `create_graph` if not given
  bool create_graph = false;              ///< allows gradients of gradients
  std::vector<at::Tensor> inputs = {};    ///< only these get gradients; if empty, all that the loss depends on
};

/// A mean loss and the number of items that it averages, so that a window is the mean over *all items*.
///
///     for (auto& batch : batches) {
///       auto mean = torch::mse_loss(model->forward(batch.data), batch.target);
///       optimizer.backward(ga::Loss{mean, batch.target.numel()});
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// A mean of means differs from that mean if micro-batches hold different numbers of valid tokens. The weight enters as
/// the seed of backward, so the loss that the user prints stays as it is.
///
/// `mean`: one element, of any floating dtype. `items`: any arithmetic type, finite and >= 0; 0 skips backward.
///
/// @note Does not synchronize: the count is a host number, and a Tensor as count does not compile.
/// @note A 16-bit loss rounds its seed, and so its weight, to 16 bits: compute the loss in float32.
struct Loss {
  at::Tensor mean;
  double items = 1.0;
  Factor seed = {};                     ///< the start of backward; loss scales and weights multiply it
  at::Tensor output = {}, target = {};  ///< the model's output and the target, for metrics

  Loss(at::Tensor loss) : mean(std::move(loss)) {}  // NOLINT(google-explicit-constructor): a tensor is a loss

  template <class Count>
  Loss(at::Tensor loss, Count count) : mean(std::move(loss)), items(number(count)) {}

  /// Attaches the model's output and the target, which metrics need.
  Loss with(at::Tensor output_of_model, at::Tensor wanted) const;

  void check_shape() const;
  void check() const;
  void backward(const BackwardOptions& options = {}) const;

 private:
  friend class detail::CapturedSteps;
  friend class detail::StepGraphs;

  template <class Count>
  static double number(Count count) {
    static_assert(!std::is_base_of_v<at::TensorBase, Count>,
                  "Loss: items is a number on the host; a Tensor count would synchronize at every micro-batch. "
                  "Count on the host, or write count.item<double>() where the wait is meant");
    static_assert(std::is_arithmetic_v<Count> || std::is_base_of_v<at::TensorBase, Count>,
                  "Loss: items must be an arithmetic count");
    if constexpr (std::is_arithmetic_v<Count>) return static_cast<double>(count);
    return 0;
  }

  // Adds the gradients of a `CompiledStep` or `GraphedStep` in place of backward. Returns false if that has to run.
  std::function<bool(const at::Tensor& loss, const detail::Multiplier& by)> ready_ = {};
};

/// Counts the micro-batches of a window and their weights. Has nothing to do with tensors.
///
///     ga::Window window(4);
///     for (auto& batch : batches) {
///       window.add(batch.data.size(0));            // this micro-batch is a mean over so many items
///       if (window.full()) window.restart();       // after the step: mean = sum · first_weight() / total_weight()
///     }
///
/// Weights enter backward relative to the window's first one, which keeps the magnitude of 16-bit gradients.
class Window {
 public:
  explicit Window(std::int64_t steps = 1) : steps_(checked(steps)), next_steps_(steps) {}

  /// Counts a micro-batch of this weight, finite and >= 0.
  void add(double weight);
  static void check_weight(double weight);

  std::int64_t count() const { return count_; }
  std::int64_t steps() const { return steps_; }
  bool full() const { return count_ >= steps_; }
  double first_weight() const { return first_weight_; }  ///< the first nonzero weight, or 0
  double total_weight() const { return total_weight_; }

  /// Sets the steps from the next window on, or of this one if it has no micro-batch yet.
  void set_steps(std::int64_t steps);
  /// Sets the steps of this window alone, at any time.
  void set_steps_of_this(std::int64_t steps) { steps_ = checked(steps); }
  void restart() { *this = Window(next_steps_); }

  /// Continues a window that was saved.
  void resume(std::int64_t count, double first_weight, double total_weight);

 private:
  static std::int64_t checked(std::int64_t steps);

  std::int64_t steps_, next_steps_, count_ = 0;
  double first_weight_ = 0, total_weight_ = 0;
};

/// The result of an accumulator's `step()` or `flush()`. As a `bool`: true if parameters moved, or may have on a
/// device.
///
///     ga::GradAccumulator optimizer(sgd, {.steps = 4});
///     int skipped = 0;
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       if (optimizer.step() == ga::StepResult::skipped) ++skipped;
///       optimizer.zero_grad();
///     }
class StepResult {
 public:
  /// Its enumerators are `ga::StepResult::stepped` and so on.
  enum class Kind {
    accumulated,    ///< the window is still open
    empty,          ///< closed without weight or gradients, so there was nothing to step with
    skipped,        ///< closed and skipped: the gradients had to be finite, and are not
    stepped,        ///< the parameters moved
    left_to_device  ///< the device skips the step if gradients are not finite, unknown to the host
  };
  using enum Kind;

  constexpr StepResult(Kind kind) : kind_(kind) {}  // NOLINT(google-explicit-constructor): one of the above
  /// True for `stepped` and `left_to_device`.
  constexpr operator bool() const {  // NOLINT(google-explicit-constructor): bool moved = optimizer.step()
    return kind_ == stepped || kind_ == left_to_device;
  }
  friend constexpr bool operator==(StepResult a, StepResult b) { return a.kind_ == b.kind_; }

 private:
  Kind kind_;
};

/// Steps the parameters that it owns, and clears their gradients: every `torch::optim::Optimizer` that needs no
/// closure, and a `GradAccumulator`.
template <class O>
concept optimizer = requires(O& o) {
  o.step();
  o.zero_grad();
  o.param_groups();
};

/// The base of an optimizer that multiplies by the deferred factor in its own pass, beside `torch::optim::Optimizer`:
/// it is then also found behind a `torch::optim::Optimizer&`.
///
/// `step(Gradients)` reads `raw()`, never `.grad`, and leaves the gradients as they are. If they were required to be
/// finite and are not, it moves nothing.
struct TakesGradients {
  virtual void step(Gradients gradients) = 0;
  /// Returns true if `step` leaves it to the device to check for finite gradients and to skip the step
  /// (`Gradients::judge_on_device`).
  virtual bool judges_on_device(const Gradients&) const { return false; }
  /// Returns true if the step of an element depends on no other, so that a process may step a part of a parameter.
  /// Parts are flat, and begin at a multiple of 4096 elements. `step` then gets the gradients of this process's parts,
  /// and their `norm()` is not the norm of the whole.
  virtual bool steps_by_elements() const { return false; }
  virtual ~TakesGradients() = default;
};

/// An optimizer that multiplies by the deferred factor in its own pass.
template <class O>
concept takes_gradients = optimizer<O> && requires(O& o, Gradients g) {
  o.step(g);
};

/// An optimizer that moves the parameters on some calls of `step()` only.
template <class O>
concept accumulating = optimizer<O> && requires(O& o) {
  { o.ready() } -> std::same_as<bool>;
  { o.gradients() } -> std::same_as<Gradients>;
};

namespace detail {

/// Returns the parameters of all groups.
template <class O>
std::vector<at::Tensor> parameters_of(O& optimizer) {
  std::vector<at::Tensor> all;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) all.push_back(parameter);
  return all;
}

}  // namespace detail

/// Clips a window's gradients to an L2 norm of at most `max_norm`, by a deferred factor. Returns the norm before.
///
///     if (optimizer.ready()) {
///       auto norm = ga::clip_grad_norm_(optimizer.gradients(), 1.0);      // 0-dim float64; nobody has waited for it
///       if (optimizer.updates() % 100 == 0) std::cout << norm.item<double>() << '\n';
///     }
///     optimizer.step();
///
/// The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. `max_norm` is > 0; infinity
/// only measures. A norm of NaN makes the gradients NaN, as in PyTorch.
///
/// @note Does not synchronize.
at::Tensor clip_grad_norm_(Gradients gradients, double max_norm);

/// torch.nn.utils.clip_grad_norm_ without synchronizing: clips the gradients of `parameters` in place. Returns their
/// `norm_type`-norm (> 0, or infinity) before, 0-dim float64.
///
///     torch::mse_loss(model->forward(x), y).backward();
///     at::Tensor norm = ga::clip_grad_norm_(model->parameters(), 1.0);
///     sgd.step();
///
/// Unlike LibTorch's own, takes parameters on several devices, sparse gradients, and shared parameters, which count
/// once. In a loop with a GradAccumulator, call the accumulator's `clip_grad_norm_`: this one would clip an unfinished
/// sum, which is an error.
///
/// @note Synchronizes with the device only with `error_if_nonfinite`, which throws before anything is clipped.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

/// Clamps every element of a window's gradients, in their true size, to [-clip_value, clip_value], at once. Does not
/// synchronize.
void clip_grad_value_(Gradients gradients, double clip_value);

/// torch.nn.utils.clip_grad_value_, also for sparse gradients and shared parameters.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/gradients.ipp>
#endif
