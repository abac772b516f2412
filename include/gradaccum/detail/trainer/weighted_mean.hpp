// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include <optional>

namespace gradaccum {

class Archive;

namespace detail {

/// The mean of numbers that are means themselves, each over `weight` items; in float64. A number on a device is summed
/// up there: nobody waits for it.
class WeightedMean {
 public:
  void add(const at::Tensor& mean, double weight);
  void add(double mean, double weight) {
    host_sum_ += weight * mean;
    weight_ += weight;
  }
  double weight() const { return weight_; }
  /// 0-dim float64, on the device of the numbers; NaN if there are none.
  at::Tensor value() const;
  void state(Archive& archive);

 private:
  double weight_ = 0, host_sum_ = 0;
  at::Tensor device_sum_;
};

}  // namespace detail
}  // namespace gradaccum

namespace gradaccum::detail {

inline void WeightedMean::add(const at::Tensor& mean, double weight) {
  if (weight == 0) return;  // a mean over nothing is often NaN
  if (mean.device().is_cpu()) return add(mean.item<double>(), weight);
  const auto part = mean.detach().to(at::kDouble).mul(weight);
  device_sum_ = device_sum_.defined() ? device_sum_.add(part.to(device_sum_.device())) : part;
  weight_ += weight;
}

inline at::Tensor WeightedMean::value() const {
  if (!device_sum_.defined()) return at::scalar_tensor(host_sum_ / weight_, at::kDouble);
  return device_sum_.add(host_sum_).div(weight_).reshape({});
}

inline void WeightedMean::state(Archive& archive) {
  archive("weight", weight_);
  archive("sum", host_sum_);
  auto on_device = device_sum_.defined() ? std::optional(device_sum_) : std::nullopt;
  archive("sum_on_device", on_device);
  device_sum_ = on_device.value_or(at::Tensor());
}

}  // namespace gradaccum::detail
