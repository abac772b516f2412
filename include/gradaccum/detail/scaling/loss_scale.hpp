// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace gradaccum::detail {

/// The loss scale and its updates: bit for bit those of PyTorch's device kernels, in float32, but on the host.
struct LossScale {
  double growth_factor = 2, backoff_factor = 0.5, min_scale = 0;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker = 0;  ///< updates since the last overflow, or since growth was last due
  float value = 1;

  void check() const;
  void set(double scale, const char* name);  ///< `name`: the user's name for it
  void back_off();
  void count_clean_update();
  /// Throws if overflows have taken the scale below `min_scale`, or to `smallest`.
  void check_reached(float scale, float smallest) const;

  std::map<std::string, double> state_dict() const;
  /// Loads the entries. An exception leaves `*this` half-changed: load into a copy.
  void load_state_dict(const std::map<std::string, double>& state);
};

/// A device number that is copied to the host without a wait, and read once it has arrived.
class AsyncNumber {
 public:
  /// Begins to copy a 0-dim float32 tensor. Does nothing while a copy is in flight.
  void ask(const at::Tensor& number);
  /// Returns the number once, if it has arrived.
  std::optional<float> answer();

 private:
  at::Tensor on_host_;
  std::optional<c10::Event> copied_;
};

/// A loss scale that stays on a device, which updates it as `LossScale` would.
class DeviceScale {
 public:
  DeviceScale(const LossScale& scale, at::Device device);

  /// The scale as 0-dim float32 and float64 tensors, not written to while other code has them: backward keeps them.
  const at::Tensor& value() const { return value_; }
  const at::Tensor& wide() const { return wide_; }

  /// Updates the scale. `found_inf`: 0-dim float32, 1 after an overflow. Throws if the scale has left its range, some
  /// updates late, since the host does not wait for it.
  void update(const at::Tensor& found_inf, LossScale by);

  /// Returns `by` with the device's value and count, and waits for the device.
  LossScale read(LossScale by) const;

 private:
  void set_state(at::Tensor state);
  static at::Tensor growth_tracker_in(const at::Tensor& state);

  StreamMemory memory_, before_;  // of this state, and of the last one
  at::Tensor state_;              // float64 [2] as ScaleState has it
  at::Tensor value_, wide_;       // views of the state
  AsyncNumber heard_;
};

}  // namespace gradaccum::detail
