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

GRADACCUM_INLINE Multiplier Multiplier::moved_to(at::Device device) const {
  auto moved = *this;
  for (auto* const known : {&moved.device_numerator, &moved.device_denominator, &moved.found_inf, &moved.left_out})
    if (known->defined()) *known = known->to(device, /*non_blocking=*/true);
  return moved;
}

GRADACCUM_INLINE DeviceMultiplier Multiplier::pointers() const {
  const auto number = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<double>() : nullptr;
  };
  const auto flag = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
  };
  return {numerator,       denominator,   number(device_numerator), number(device_denominator),
          flag(found_inf), flag(left_out)};
}

}  // namespace gradaccum::detail
