// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

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

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/weighted_mean.ipp>
#endif
