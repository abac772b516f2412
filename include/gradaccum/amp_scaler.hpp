// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/scaling/device_scale.hpp>
#include <gradaccum/detail/scaling/loss_scale.hpp>
#include <gradaccum/detail/scaling/scaled_windows.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace gradaccum {

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
    unscale_window(detail::scalable(optimizer));
  }

  /// Steps the optimizer, unless its gradients overflowed: then they are discarded with their window. Inside an
  /// accumulator's window it counts the micro-batch, nothing else. True if the parameters moved, or if the device is to
  /// find out (`.on_device`): then an accumulator counts an update either way. Of a plain optimizer without gradients,
  /// or an empty window, nothing moves, and it is not counted towards growth.
  ///
  /// @note Reads 4 bytes from the device when a window closes.
  template <class Optimizer>
  bool step(Optimizer& optimizer) {
    return step_window(detail::scalable(optimizer));
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
  void hear(bool overflowed) { windows_.hear(overflowed ? detail::Verdict::overflow : detail::Verdict::clean); }

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
  using Stage = detail::ScaledWindow::Stage;

  void unscale_window(const detail::Scalable& optimizer);
  bool step_window(const detail::Scalable& optimizer);
  /// Whoever closes the window from now on divides by the scale, and looks for overflow.
  void join(detail::ScaledWindow& window, const detail::Scalable& optimizer);

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
  detail::ScaledWindows windows_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/amp_scaler.ipp>
#endif
