// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace gradaccum::detail {

/// Products of reciprocals, or in another order, differ in their last bits: sorted, they do not.
inline double sorted_product(std::vector<double> factors) {
  std::sort(factors.begin(), factors.end());
  double product = 1.0;
  for (double factor : factors) product *= factor;
  return product;
}

/// The same on a device, without waiting for it; undefined where there is none.
inline at::Tensor sorted_product(const std::vector<at::Tensor>& factors) {
  if (factors.size() < 2) return factors.empty() ? at::Tensor() : factors.front();
  std::vector<at::Tensor> on_one_device;
  for (auto& factor : factors) on_one_device.push_back(factor.to(factors.front().device(), /*non_blocking=*/true));
  return std::get<0>(at::stack(on_one_device).sort()).prod();
}

/// The one number that gradients are multiplied by: a host part, and a part that is known on a device only.
struct Multiplier {
  double numerator = 1.0, denominator = 1.0;
  at::Tensor device_numerator = {}, device_denominator = {};  ///< 0-dim float64, or undefined

  bool on_host() const { return !device_numerator.defined() && !device_denominator.defined(); }
  double host() const { return numerator / denominator; }
  bool is_one() const { return on_host() && host() == 1; }

  /// The whole product, as a 0-dim float64 tensor on `device`.
  at::Tensor on(at::Device device) const {
    auto product = at::full({}, host(), at::TensorOptions(at::kDouble).device(device));
    if (device_numerator.defined()) product.mul_(device_numerator.to(device));
    if (device_denominator.defined()) product.div_(device_denominator.to(device));
    return product;
  }
};

}  // namespace gradaccum::detail
