// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/scaling/device_scale.hpp>
#include <gradaccum/detail/scaling/loss_scale.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

namespace gradaccum {

class Accumulator;

namespace detail {
class WindowGradients;
/// Refuses what a reference can hide, and a type would have told the compiler.
void check_nothing_hides_behind(const torch::optim::Optimizer& optimizer);
/// Refuses float16: the update itself would round away what the loss scale has saved.
void check_none_is_half(const std::vector<at::Tensor>& parameters);
}  // namespace detail

/// How the scale of the loss begins and moves: the names and numbers are those of `torch.amp.GradScaler`.
struct AmpScalerOptions {
  double init_scale = 65536.0;          ///< > 0 and finite, in float32
  double growth_factor = 2.0;           ///< > 1
  double backoff_factor = 0.5;          ///< > 0 and < 1
  std::int64_t growth_interval = 2000;  ///< updates without an overflow until the scale grows, >= 1
  bool enabled = true;                  ///< if not, `step` just steps, and the rest does nothing
  double min_scale = 0;                 ///< an overflow that would take the scale below it is an error
  bool on_device = false;               ///< the scale, and what overflows, stay on the device: nobody waits
};

/// torch.amp.GradScaler, method for method: scales the loss, so that float16 gradients do not underflow, and finds the
/// scale.
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
/// A scale that is too large makes gradients overflow: then the step is left out, and `update()` takes a smaller one;
/// after `growth_interval` updates without an overflow, a larger one. An accumulator's window is divided by the scale
/// when it closes, by `step` or by its own `flush()`; until then the scale does not change. Clipping by
/// `optimizer.clip_grad_norm_` needs no `unscale_`: it is one factor.
///
/// Takes any `optimizer`, user-made ones too, but LBFGS; an accumulator itself, not a `torch::optim::Optimizer&` to it.
/// Parameters are float32, float64 or bfloat16, dense or sparse, on any devices; float16 ones are refused. Misuse is an
/// error that changes nothing.
///
/// With `.on_device` the device itself leaves out a step that overflowed, and changes the scale: Python's numbers to
/// the bit, and the host waits for nothing. It does not know either: `step` is true where the step is left to the
/// device. That takes an optimizer of `ga::optim`, or one whose `TakesGradients::judges_on_device` says so, with all
/// parameters on devices, and no window left open by `update()`; else it is as without (docs/mixed_precision.md).
///
/// @note The scale is a host number, and one thing is read from the device, 4 bytes a window: whether it overflowed. By
/// `step`, when it closes; by `update`, of one that was unscaled and then not stepped. Nothing else here waits.
/// With `.on_device` nothing but `get_scale()`, `state_dict()` and `update(new_scale)` does; and the optimizer, when
/// its state is asked for.
class AmpScaler {
 public:
  explicit AmpScaler(AmpScalerOptions options = {});
  AmpScaler(const AmpScaler&) = delete;  // the windows of an optimizer belong to one scaler
  AmpScaler& operator=(const AmpScaler&) = delete;

  /// The loss times the scale, in float32 where the loss is one float16 number. To call `backward()` of.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  [[nodiscard]] std::vector<at::Tensor> scale(std::vector<at::Tensor> losses);
  /// For `optimizer.backward`: the scale joins the seed of backward, in the dtype of the loss.
  [[nodiscard]] Loss scale(Loss loss);

  /// Gives the gradients their true size, at once, for code that reads or changes them; what `step` will do about
  /// overflow is settled then. Once a window, before `step`; of an accumulator after the last backward, inside
  /// `if (optimizer.ready())`.
  ///
  /// @note Does not wait for the device.
  template <class Optimizer>
  void unscale_(Optimizer& optimizer) {
    auto any = checked(optimizer);
    unscale_window(any, accumulator_in(optimizer));
  }

  /// Steps the optimizer, unless its gradients overflowed: then they are discarded with their window. Inside an
  /// accumulator's window it counts the micro-batch, nothing else. As a `bool`: the parameters moved, or the device is
  /// to find out (`.on_device`): then an accumulator counts an update either way. Of a plain optimizer without
  /// gradients, or an empty window, nothing moves, and it is not counted towards growth.
  ///
  /// @note Reads 4 bytes from the device when a window closes.
  template <class Optimizer>
  StepResult step(Optimizer& optimizer) {
    auto any = checked(optimizer);
    return step_window(any, accumulator_in(optimizer));
  }

  /// Changes the scale, if it is time: call it after the steps of all optimizers. An overflow in any window since the
  /// last call makes it smaller, once; `growth_interval` calls without make it larger. Growth waits for the first call
  /// at which no window is open; where an overflow or `new_scale` changes the scale, open windows are discarded. Does
  /// nothing where no window was closed. Throws where an overflow would take the scale below `min_scale`; with
  /// `.on_device` when it has, some updates later.
  void update(std::optional<double> new_scale = {});

  /// For those who own a window themselves, in place of `step`: whoever applies the factor divides by the scale, and
  /// requires what comes of it to be finite. What came of it is told to `update()` by `hear`.
  void unscale(Factor& factor) const;
  void hear(bool overflowed) { (overflowed ? found_.inf : found_.finite) = true; }

  double get_scale() const { return enabled_ ? current().value : 1.0; }
  double get_growth_factor() const { return scale_.growth_factor; }
  double get_backoff_factor() const { return scale_.backoff_factor; }
  std::int64_t get_growth_interval() const { return scale_.growth_interval; }
  void set_growth_factor(double new_factor) { set(&detail::LossScale::growth_factor, new_factor); }
  void set_backoff_factor(double new_factor) { set(&detail::LossScale::backoff_factor, new_factor); }
  void set_growth_interval(std::int64_t new_interval) { set(&detail::LossScale::growth_interval, new_interval); }
  bool is_enabled() const { return enabled_; }

  /// Python's five entries; empty if disabled. To be taken after `update()`.
  std::map<std::string, double> state_dict() const;
  /// Throws, and changes nothing, where an entry is missing or out of range, or where a window is open.
  void load_state_dict(const std::map<std::string, double>& state) { load(state)(); }
  /// The same entries, for `ga::save`.
  void state(Archive& archive);

 private:
  /// Python's `_per_optimizer_states`: where an optimizer stands, and its window, which has the scale in it until it is
  /// unscaled or closed.
  struct PerOptimizer {
    enum class Stage { ready, unscaled, stepped };

    Stage stage = Stage::ready;
    std::optional<Gradients> gradients = {};                  // none: the scaler has not met this window yet
    Accumulator* accumulator = nullptr;                       // whose window it is
    std::shared_ptr<detail::WindowGradients> one_batch = {};  // the window of any other optimizer

    bool closed() const { return !gradients || gradients->closed(); }
    bool open() const { return accumulator && !closed(); }
    /// What became of a window that was closed by `flush()` or the like, or was only unscaled.
    StepResult result();
  };
  using Stage = PerOptimizer::Stage;
  /// What gradients have been since the last update.
  struct Found {
    bool finite = false, inf = false;
    std::vector<at::Tensor> on_devices = {};  // 0-dim float32, 1 after an overflow
  };

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
    if constexpr (std::derived_from<Optimizer, torch::optim::Optimizer>) detail::check_nothing_hides_behind(optimizer);
    return detail::OptimizerOf<Optimizer>(optimizer);
  }
  template <class Optimizer>
  static Accumulator* accumulator_in(Optimizer& optimizer) {
    if constexpr (std::derived_from<Optimizer, Accumulator>) return &optimizer;
    return nullptr;
  }

  void unscale_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator);
  StepResult step_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator);
  PerOptimizer& state_of(const detail::AnyOptimizer& optimizer);
  /// Whoever closes the window from now on divides by the scale, and looks for overflow.
  void join(PerOptimizer& state, const detail::AnyOptimizer& optimizer, Accumulator* accumulator);
  void note(StepResult result, PerOptimizer& state);
  void note_all();
  /// Waits for what is known on a device alone.
  const Found& found_on_host();
  bool any_open() const;
  /// Windows that are still open stay. `finite`: that the others were finite counts at the next update.
  void forget_closed(bool finite = false);

  template <class Value>
  void set(Value detail::LossScale::*member, Value value) {
    auto next = scale_;
    next.*member = value;
    next.check();
    scale_ = next;
  }
  /// Checks it; what is returned loads it.
  std::function<void()> load(const std::map<std::string, double>& state);
  void change_to(const detail::LossScale& next);
  const at::Tensor& scale_on(at::Device device);

  /// Of the device, where it has the scale.
  detail::LossScale current() const { return device_scale_ ? device_scale_->read(scale_) : scale_; }
  /// Whether the device could be left with it.
  bool update_on_device();

  detail::LossScale scale_;  // value and count are those of the device, where it has them
  std::optional<detail::DeviceScale> device_scale_;
  bool enabled_, on_device_;
  std::unordered_map<at::Device, at::Tensor> on_devices_;
  std::map<const void*, PerOptimizer> optimizers_;  // that were met since the scale could last change
  Found found_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/amp_scaler.ipp>
#endif
