// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/weighted_mean.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/scalar_tensor.h>

#include <optional>

namespace gradaccum::detail {

GRADACCUM_INLINE void WeightedMean::add(const at::Tensor& mean, double weight) {
  if (weight == 0) return;  // a mean over nothing is often NaN
  if (mean.device().is_cpu()) return add(mean.item<double>(), weight);
  const auto part = mean.detach().to(at::kDouble).mul(weight);
  device_sum_ = device_sum_.defined() ? device_sum_.add(part.to(device_sum_.device())) : part;
  weight_ += weight;
}

GRADACCUM_INLINE at::Tensor WeightedMean::value() const {
  if (!device_sum_.defined()) return at::scalar_tensor(host_sum_ / weight_, at::kDouble);
  return device_sum_.add(host_sum_).div(weight_).reshape({});
}

GRADACCUM_INLINE void WeightedMean::state(Archive& archive) {
  archive("weight", weight_);
  archive("sum", host_sum_);
  auto on_device = device_sum_.defined() ? std::optional(device_sum_) : std::nullopt;
  archive("sum_on_device", on_device);
  device_sum_ = on_device.value_or(at::Tensor());
}

}  // namespace gradaccum::detail
