// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/multiplier.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/full.h>

namespace gradaccum::detail {

GRADACCUM_INLINE at::Tensor Multiplier::on(at::Device device) const {
  auto product = at::full({}, host(), at::TensorOptions(at::kDouble).device(device));
  if (device_numerator.defined()) product.mul_(device_numerator.to(device));
  if (device_denominator.defined()) product.div_(device_denominator.to(device));
  return product;
}

}  // namespace gradaccum::detail
