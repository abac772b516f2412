// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: window

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

class AmpScaler;
namespace detail {
class FusedGradients;
struct Multiplier;
class WindowGradients;
}  // namespace detail

/// Collects deferred factors of gradients, or of the seed of a backward pass.
///
///     ga::Gradients gradients(model->parameters());
///     torch::mse_loss(model->forward(x), y).mul(65536.0).backward();
///     gradients.factor().divide(65536.0);                  // the loss scale
///     gradients.factor().multiply(torch::tensor(0.5));     // a device tensor: does not synchronize
///     gradients.apply();                                   // one pass for all factors
///     sgd.step();
///
/// A factor is written but not read, so no writer depends on another, and any order of writers gives bitwise the same
/// product: multipliers and divisors are stored separately, sorted before they are multiplied, and divided once.
///
/// @note Does not synchronize. A CPU tensor is read immediately; a device tensor is copied on the device.
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

  /// Returns the whole product, for code that applies it.
  friend detail::Multiplier product_of(const Factor& factor);
  friend bool finite_required(const Factor& factor) { return factor.finiteness_ != Finiteness::any; }
  friend bool may_stay_on_device(const Factor& factor) { return factor.finiteness_ == Finiteness::required_on_device; }
  /// Returns a factor with the requirement only, once the rest has been applied.
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

/// The gradients of one window, and their deferred factor.
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
/// Loss scaling, clipping and the mean over a window and over ranks all multiply the gradients. `factor()` collects
/// them, and they are applied in one pass: by an optimizer that takes `Gradients` in its step, for any other by
/// `apply()` before its step.
///
/// A handle: copies refer to the same window, and are `closed()` with it. An object that is constructed from parameters
/// is a window of one batch. Parameters may be of any dtype, on several devices, shared or frozen; gradients may be
/// dense, sparse (COO) or undefined.
///
/// @note Only `overflowed()` and reading returned tensors synchronize; with parameters on the CPU and on a device, also
/// a factor that only the device knows. With sharded parameters, norms and overflows are exchanged between ranks.
class Gradients {
 public:
  explicit Gradients(const std::vector<at::Tensor>& parameters);

  /// Returns the deferred, write-only factor of all gradients.
  Factor& factor();

  /// Returns the sum of the weights of the window's micro-batches so far, on this rank. The default weight is 1.
  double items() const;

  /// Returns the parameters that have a gradient, in the order of `raw()` and `values()`.
  std::vector<at::Tensor> parameters() const;

  /// Returns the gradients in memory, before multiplication: `.grad`, or sums that are stored separately. For
  /// optimizers, which multiply by `multiplier(device)` themselves.
  std::vector<at::Tensor> raw() const;

  /// Returns the `.grad` of each parameter after applying the factor, to read and change. Throws inside an incomplete
  /// window.
  std::vector<at::Tensor> values();

  /// Returns the number by which `raw()` must be multiplied, 0-dim float64: the factor and the mean over the window.
  at::Tensor multiplier(at::Device device) const;

  /// Returns the L2 norm of the multiplied gradients, 0-dim float64; duplicates in a sparse gradient count as their
  /// sum. Cached until a gradient changes.
  at::Tensor norm();

  /// Returns the `norm()` before `clip_grad_norm_` clipped these gradients, or that a `GuardNorm` has measured;
  /// undefined otherwise.
  const at::Tensor& norm_before_clipping() const;

  /// Returns 1 if an element is inf or NaN, else 0: 0-dim float32. Finite numbers whose squares overflow are finite.
  at::Tensor found_inf();

  /// Returns true if the step requires finite gradients, as with a loss scaler.
  bool finite_required() const;
  /// Returns true if finite gradients are required, the window is not rejected, and the optimizer may skip the step on
  /// the device, by `judge_on_device()`.
  bool may_be_judged_on_device() const;

  /// Returns true if the step must be skipped, because finite gradients are required and they are not. Reads 4 bytes
  /// from the device on the first call in a window.
  bool overflowed();
  /// Returns `found_inf()`, for a step that the device skips, in place of `overflowed()`.
  at::Tensor judge_on_device();
  /// Returns true if `overflowed()` or `judge_on_device()` was called, which a step does first.
  bool judged() const;
  bool judged_on_device() const;  ///< true after `judge_on_device()`, until the host has read the result

  /// Makes the step reject this complete window: it changes neither parameters, nor the optimizer's state and step
  /// counts, nor a loss scale. `why` is for reports.
  ///
  ///     struct RejectLarge {
  ///       double limit = 1e3;
  ///       void before_step(ga::Gradients& gradients) const {
  ///         if (gradients.norm().item<double>() > limit) gradients.reject("a norm above the limit");
  ///       }
  ///     };
  ///     ga::Trainer trainer(model, sgd, objective, RejectLarge{.limit = 10});
  ///     std::cout << trainer.fit(batches).rejected << " windows rejected\n";
  ///
  /// Applies to the window of an accumulator or a Trainer, and to an object that is passed to `step(gradients)`:
  /// another object made of the same parameters is another window. Buffers, such as BatchNorm's statistics, and random
  /// numbers have changed in the forward pass. All ranks must reject the same windows, which the next window checks;
  /// `norm()` is equal on all.
  void reject(std::string why = {});
  /// Returns the argument of `reject()`; nullopt if it was not called.
  const std::optional<std::string>& rejected() const;

  /// Multiplies the gradients by the factor, and moves separate sums to `.grad`. A second call does nothing.
  void apply();

  /// Returns true once the window was stepped, skipped, rejected or discarded. `items()` is still valid then, and so
  /// are `norm()` and `found_inf()` if they were called before; the gradients no longer belong to the window.
  bool closed() const;

  /// Returns `multiplier` in its parts: the part that the host knows needs no device.
  friend detail::Multiplier product_of(const Gradients& gradients);
  friend at::Tensor clip_grad_norm_(Gradients gradients, double max_norm);

 private:
  friend class AmpScaler;
  friend class detail::WindowGradients;

  explicit Gradients(std::shared_ptr<detail::WindowGradients> window) : window_(std::move(window)) {}

  std::shared_ptr<detail::WindowGradients> window_;
};

/// Options of a backward pass, like the arguments of `torch::Tensor::backward`.
struct BackwardOptions {
  std::optional<bool> retain_graph = {};  ///< keep the graph for another pass; by default equal to `create_graph`
  bool create_graph = false;              ///< allow gradients of gradients
  std::vector<at::Tensor> inputs = {};    ///< tensors that get gradients; if empty, all that the loss depends on
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
/// The mean of the micro-batches' means differs from this mean if they have different numbers of valid tokens. The
/// weight multiplies the seed of backward, so `mean` itself is unchanged.
///
/// `mean`: one element, of any floating dtype. `items`: any arithmetic type, finite and >= 0; 0 skips backward.
///
/// @note Does not synchronize: the count is a host number, and a Tensor as count does not compile.
/// @note A 16-bit loss rounds its seed, and so its weight, to 16 bits: compute the loss in float32.
struct Loss {
  at::Tensor mean;
  double items = 1.0;
  Factor seed = {};                     ///< factor of the gradient that backward starts with, such as a loss scale
  at::Tensor output = {}, target = {};  ///< the model's output and the target, for metrics

  Loss(at::Tensor loss) : mean(std::move(loss)) {}  // NOLINT(google-explicit-constructor): a tensor is a loss

  template <class Count>
  Loss(at::Tensor loss, Count count) : mean(std::move(loss)), items(number(count)) {}

  /// Attaches the model's output and the target, which metrics need.
  Loss with(at::Tensor output_of_model, at::Tensor wanted) const;

  /// Adds another mean that counts as `weight` of this loss's items, as for a loss that is a mean over other items.
  ///
  ///     double rows_of_window = 0, items_of_window = 0;          // known before the window's first backward
  ///     for (auto& batch : batches) rows_of_window += batch.data.size(0), items_of_window += batch.target.numel();
  ///     for (auto& batch : batches) {
  ///       auto output = model->forward(batch.data);
  ///       auto penalty = output.square().sum(1).mean();          // a mean over rows
  ///       auto weight = batch.data.size(0) * items_of_window / rows_of_window;
  ///       auto loss = ga::Loss{torch::mse_loss(output, batch.target), batch.target.numel()}.plus(penalty, weight);
  ///       optimizer.backward(loss);
  ///       optimizer.step();
  ///       optimizer.zero_grad();
  ///     }
  ///
  /// With the weight `n * items_of_window / n_of_window`, where n counts what the other mean is over, the window's
  /// gradient is that of both means over the large batch. The items of this loss must not be 0.
  Loss plus(const at::Tensor& other, double weight) const;

  /// Attaches gradients that a function of your own computes, such as a fused backward pass or a kernel.
  ///
  ///     at::NoGradGuard no_graph;
  ///     auto weight = torch::zeros({3, 4}).requires_grad_();
  ///     auto error = x.mm(weight.t()) - y;
  ///     auto gradients = [&](const at::Tensor& seed) {
  ///       return std::vector<at::Tensor>{error.t().mm(x) * (2.0 / error.numel() * seed)};
  ///     };
  ///     ga::Loss{error.square().mean(), error.numel()}.with_gradients({weight}, gradients).backward();
  ///
  /// `backward` calls the function and adds the result to `.grad`, without autograd's engine. `seed`, the gradient of
  /// the mean, is 0-dim float64: on the CPU if the host knows it, else on the mean's device. The function returns a
  /// gradient for each parameter, each in memory of its own, and undefined for a parameter that has none.
  ///
  /// A mean with a graph keeps it. By that graph autograd computes the gradients if the function returns an empty
  /// vector, if `mean` has changed or was replaced, if it or a parameter has a hook, and with `BackwardOptions`. A mean
  /// without a graph gets one of one operation, which calls the function in these cases.
  Loss with_gradients(std::vector<at::Tensor> parameters,
                      std::function<std::vector<at::Tensor>(const at::Tensor& seed)> gradients) const;

  void check_shape() const;
  void check() const;
  void backward(const BackwardOptions& options = {}) const;

 private:
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

  std::shared_ptr<const detail::FusedGradients> gradients_ = {};
};

/// Returns the gradient of the mean in the pass of `Loss::backward` that is running, for a function that injects
/// gradients without being a part of the loss, such as one that balances a mixture of experts.
///
///     struct Balanced : torch::autograd::Function<Balanced> {  // returns x, and trains `penalty`, too
///       static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& penalty) {
///         return x.view_as(x);
///       }
///       static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
///                                                      torch::autograd::variable_list gradients) {
///         return {gradients[0], ga::backward_seed()};          // times a weight relative to the loss's items
///       }
///     };
///     auto hidden = model->forward(x);
///     optimizer.backward(ga::Loss{torch::mse_loss(Balanced::apply(hidden, hidden.square().mean()), y), y.numel()});
///
/// It contains the loss scale, and the weight relative to the window's first micro-batch; the step divides both out.
/// 0-dim float64, on the CPU if the host knows it, else on a device; 1 outside of such a pass.
at::Tensor backward_seed();

/// The result of an accumulator's `step()` or `flush()`. Converts to true if parameters were updated, or a device
/// decides it.
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
    empty,          ///< closed without weight or gradients, so without an update
    skipped,        ///< closed and skipped, since finite gradients were required and they are not
    rejected,       ///< closed without an update, after `Gradients::reject()`
    stepped,        ///< closed with an update of the parameters
    left_to_device  ///< closed; the device skips the update if gradients are not finite, and the host does not wait
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

/// An optimizer: every `torch::optim::Optimizer` that needs no closure, a `GradAccumulator`, and custom classes.
template <class O>
concept optimizer = requires(O& o) {
  o.step();
  o.zero_grad();
  o.param_groups();
};

/// The second base class, next to `torch::optim::Optimizer`, of an optimizer that applies the deferred factor in its
/// step. It is then also found through a `torch::optim::Optimizer&`.
///
/// `step(Gradients)` reads `raw()`, never `.grad`, and does not change the gradients. If they are required to be finite
/// and are not, or were rejected, it makes no update.
struct TakesGradients {
  virtual void step(Gradients gradients) = 0;
  /// Returns the step as a function, after its checks and with its memory, so that of several optimizers none steps if
  /// one cannot. Returns an empty function if `step` makes the checks, as by default.
  virtual std::function<void()> prepare(Gradients /*gradients*/) { return nullptr; }
  /// Returns true if `step` leaves it to the device to check for finite gradients and to skip the step
  /// (`Gradients::judge_on_device`).
  virtual bool judges_on_device(const Gradients&) const { return false; }
  /// Returns true if the step of an element depends on no other, so that a rank may step a part of a parameter. Parts
  /// are flat, and begin at a multiple of 4096 elements. `step` then receives the gradients of this rank's parts, and
  /// their `norm()` is not the norm over all parts.
  virtual bool steps_by_elements() const { return false; }
  virtual ~TakesGradients() = default;
};

/// An optimizer that applies the deferred factor in its step.
template <class O>
concept takes_gradients = optimizer<O> && requires(O& o, Gradients g) {
  o.step(g);
};

/// An optimizer that updates the parameters on some calls of `step()` only.
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
/// The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. `max_norm` is > 0; if it is
/// infinite, the norm is only measured. A norm of NaN makes the gradients NaN, as in PyTorch.
///
/// @note Does not synchronize.
at::Tensor clip_grad_norm_(Gradients gradients, double max_norm);

/// Clips the gradients of `parameters` in place, like torch.nn.utils.clip_grad_norm_ but without synchronizing. Returns
/// their `norm_type`-norm (> 0, or infinity) before, 0-dim float64.
///
///     torch::mse_loss(model->forward(x), y).backward();
///     at::Tensor norm = ga::clip_grad_norm_(model->parameters(), 1.0);
///     sgd.step();
///
/// Unlike LibTorch's, takes parameters on several devices, sparse gradients, and shared parameters, which count once.
/// In a loop with a GradAccumulator, call the accumulator's `clip_grad_norm_`: this function throws, since it would
/// clip an incomplete sum.
///
/// @note Synchronizes with the device only with `error_if_nonfinite`, which throws before anything is clipped.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

/// Applies the deferred factor, and clamps a window's gradients to [-clip_value, clip_value]. Does not synchronize.
void clip_grad_value_(Gradients gradients, double clip_value);

/// Clamps gradients like torch.nn.utils.clip_grad_value_, also sparse ones and gradients of shared parameters.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/gradients.ipp>
#endif
