// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/multiplier.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/full.h>

namespace gradaccum::detail {

GRADACCUM_INLINE at::Tensor Multiplier::on(at::Device device) const {
  const auto number = [&](double value) { return at::full({}, value, at::TensorOptions(at::kDouble).device(device)); };
  auto product = number(device_denominator.defined() ? numerator : host());
  if (device_numerator.defined()) product.mul_(device_numerator.to(device));
  if (device_denominator.defined()) product.div_(number(denominator).mul_(device_denominator.to(device)));
  return product;
}

}  // namespace gradaccum::detail
