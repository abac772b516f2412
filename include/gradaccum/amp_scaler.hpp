// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: scaling

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum {

class Accumulator;

namespace detail {
/// Throws for float16 parameters, whose updates would round away the precision that the loss scale has saved.
void check_none_is_half(const std::vector<at::Tensor>& parameters);
}  // namespace detail

/// Options of the loss scale, with the names and defaults of `torch.amp.GradScaler`.
struct AmpScalerOptions {
  double init_scale = 65536.0;          ///< > 0 and finite, in float32
  double growth_factor = 2.0;           ///< > 1
  double backoff_factor = 0.5;          ///< > 0 and < 1
  std::int64_t growth_interval = 2000;  ///< updates without an overflow until the scale grows, >= 1
  bool enabled = true;                  ///< false: `step` only calls the optimizer's step, and the rest does nothing
  double min_scale = 0;                 ///< throw when an overflow would take the scale below it
  bool on_device = false;               ///< keep the scale and overflows on the device, without synchronizing
};

/// Scales the loss so that float16 gradients do not underflow, with the methods of torch.amp.GradScaler.
///
///     ga::AmpScaler scaler;
///     for (auto& batch : batches) {
///       auto loss = [&] {
///         ga::Autocast autocast(batch.data.device(), torch::kHalf);
///         return torch::mse_loss(model->forward(batch.data), batch.target);
///       }();
///       scaler.scale(loss).backward();
///       scaler.step(optimizer);                            // an accumulator, or any other optimizer
///       scaler.update();
///       optimizer.zero_grad();
///     }
///
/// If the scale is too large and gradients overflow, the step is skipped, and `update()` lowers the scale; after
/// `growth_interval` updates without overflow it raises it. An accumulator's window is divided by the scale when `step`
/// or `flush()` closes it, and the scale does not change before. `optimizer.clip_grad_norm_` needs no `unscale_`.
///
/// Takes any optimizer but LBFGS; for an accumulator, the object itself rather than a `torch::optim::Optimizer&` to it.
/// Parameters may be float32, float64 or bfloat16, dense or sparse, on any devices, but not float16. If a call throws
/// for misuse, nothing has changed.
///
/// @note Reads 4 bytes per window from the device, to detect an overflow: in `step` when the window closes, or in
/// `update` for a window that was unscaled and not stepped. With `.on_device` the device skips the step and changes the
/// scale, bitwise as Python does, and the host does not wait: only `get_scale()`, `state_dict()`, `update(new_scale)`
/// and reading the optimizer's state synchronize, and `step` returns true for every step that is left to the device.
/// That needs an optimizer of `ga::optim`, or one whose `TakesGradients::judges_on_device` returns true, all parameters
/// on devices, and no open window at `update()`; otherwise the host does it (docs/mixed_precision.md).
class AmpScaler {
 public:
  explicit AmpScaler(AmpScalerOptions options = {});
  AmpScaler& operator=(AmpScaler&&) = delete;  // the windows of an optimizer belong to one scaler
  ~AmpScaler();

  /// Returns the loss times the scale, for `backward()`; in float32 if the loss is one float16 number.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  [[nodiscard]] std::vector<at::Tensor> scale(std::vector<at::Tensor> losses);
  /// Multiplies the seed of backward by the scale, in the dtype of the loss, for `optimizer.backward`.
  [[nodiscard]] Loss scale(Loss loss);

  /// Divides the gradients by the scale immediately, for code that reads or changes them, and checks for overflow, for
  /// the later `step`. Call it once per window, before `step`; for an accumulator inside `if (optimizer.ready())`,
  /// after backward.
  template <class Optimizer>
  void unscale_(Optimizer& optimizer) {
    auto any = checked(optimizer);
    unscale_window(any, accumulator_in(optimizer));
  }

  /// Steps the optimizer, or discards gradients that overflowed with their window. Inside an accumulator's window it
  /// only counts the micro-batch. The result converts to true if the parameters were updated, or if that is left to the
  /// device (`.on_device`); an accumulator then counts an update either way. Without gradients, or with an empty
  /// window, or after `Gradients::reject()`, there is no update, and the step does not count towards growth.
  ///
  /// @note Reads 4 bytes from the device when a window closes.
  template <class Optimizer>
  StepResult step(Optimizer& optimizer) {
    auto any = checked(optimizer);
    return step_window(any, accumulator_in(optimizer));
  }

  /// Changes the scale when it is due; call it after the steps of all optimizers. Overflows since the last call lower
  /// it once; `growth_interval` calls without overflow raise it, at the first call without an open window. If an
  /// overflow or `new_scale` changes the scale, open windows are discarded. Does nothing if no window was closed.
  /// Throws if an overflow would take the scale below `min_scale`; with `.on_device` some updates later.
  void update(std::optional<double> new_scale = {});

  /// Makes a window's factor divide by the scale and require finite gradients, for code that closes windows itself
  /// rather than by `step`. It then passes the outcome to `record_overflow`.
  void unscale(Factor& factor) const;
  void record_overflow(bool overflowed);

  double get_scale() const;
  double get_growth_factor() const;
  double get_backoff_factor() const;
  std::int64_t get_growth_interval() const;
  void set_growth_factor(double new_factor);
  void set_backoff_factor(double new_factor);
  void set_growth_interval(std::int64_t new_interval);
  bool is_enabled() const;

  /// Returns Python's five entries; empty if disabled. Call it after `update()`.
  std::map<std::string, double> state_dict() const;
  /// Loads the entries. Throws, and changes nothing, if an entry is missing or out of range, or a window is open.
  void load_state_dict(const std::map<std::string, double>& state);
  /// Saves and loads the entries of `state_dict()`, for `ga::save` and `ga::load`.
  void state(Archive& archive);

 private:
  struct State;

  template <class Optimizer>
  static detail::OptimizerOf<Optimizer> checked(Optimizer& optimizer) {
    static_assert(!std::derived_from<Optimizer, torch::optim::LBFGS>,
                  "AmpScaler: LBFGS calls its closure several times a step, each with gradients of its own; use SGD, "
                  "Adam, AdamW, RMSprop, Adagrad or one of your own");
    static_assert(gradaccum::optimizer<Optimizer> || std::derived_from<Optimizer, torch::optim::LBFGS>,
                  "AmpScaler: an optimizer has step(), zero_grad() and param_groups()");
    static_assert(
        !accumulating<Optimizer> || std::derived_from<Optimizer, Accumulator>,
        "AmpScaler: an accumulator is a GradAccumulator; of a class of your own, step() cannot say whether the "
        "window goes on");
    return detail::OptimizerOf<Optimizer>(optimizer);
  }
  template <class Optimizer>
  static Accumulator* accumulator_in(Optimizer& optimizer) {
    if constexpr (std::derived_from<Optimizer, Accumulator>) return &optimizer;
    return nullptr;
  }

  void unscale_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator);
  StepResult step_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator);

  std::unique_ptr<State> state_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/scaling/amp_scaler.ipp>
#endif
