// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/factor.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace gradaccum {
namespace detail {

/// Sorts the factors first: products of reciprocals, or in another order, differ in their last bits.
GRADACCUM_INLINE double sorted_product(std::vector<double> factors) {
  std::sort(factors.begin(), factors.end());
  double product = 1.0;
  for (double factor : factors) product *= factor;
  return product;
}

/// Multiplies sorted device factors without waiting for the device; undefined if there are none.
GRADACCUM_INLINE at::Tensor sorted_product(const std::vector<at::Tensor>& factors) {
  if (factors.size() < 2) return factors.empty() ? at::Tensor() : factors.front();
  std::vector<at::Tensor> on_one_device;
  for (auto& factor : factors) on_one_device.push_back(factor.to(factors.front().device(), /*non_blocking=*/true));
  return std::get<0>(at::stack(on_one_device).sort()).prod();
}

/// Copies a factor, since its owner may change the tensor before it is used.
GRADACCUM_INLINE at::Tensor copied_factor(const at::Tensor& by) {
  return by.detach().to(at::kDouble, /*non_blocking=*/true, /*copy=*/true);
}

}  // namespace detail

GRADACCUM_INLINE bool Factor::on_host(const at::Tensor& by) {
  TORCH_CHECK(by.defined() && by.dim() == 0, "Factor: must be a number or a 0-dim tensor, got ",
              by.defined() ? c10::str("shape ", by.sizes()) : "an undefined tensor");
  return by.device().is_cpu();
}

GRADACCUM_INLINE void Factor::multiply(const at::Tensor& by) {
  if (on_host(by)) return multiply(by.item<double>());
  device_multipliers_.push_back(detail::copied_factor(by));
}

GRADACCUM_INLINE void Factor::divide(double by) {
  TORCH_CHECK(by != 0, "Factor: a divisor must not be 0");
  divisors_.push_back(by);
}

GRADACCUM_INLINE void Factor::divide(const at::Tensor& by) {
  if (on_host(by)) return divide(by.item<double>());
  device_divisors_.push_back(detail::copied_factor(by));
}

GRADACCUM_INLINE detail::Multiplier product_of(const Factor& factor) {
  return {detail::sorted_product(factor.multipliers_), detail::sorted_product(factor.divisors_),
          detail::sorted_product(factor.device_multipliers_), detail::sorted_product(factor.device_divisors_)};
}

GRADACCUM_INLINE Factor requirement_of(const Factor& factor) {
  Factor bare;
  bare.finiteness_ = factor.finiteness_;
  return bare;
}

}  // namespace gradaccum
