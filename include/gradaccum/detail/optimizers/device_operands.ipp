// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/device_operands.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>

#include <ATen/Context.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE at::Tensor Extent::of(const at::Tensor& tensor) const {
  if (whole || !tensor.defined()) return tensor;
  const auto real = as_real(tensor);
  return real.as_strided({size()}, {1}, real.storage_offset() + from);
}

GRADACCUM_INLINE bool DeviceOperand::copies_parameter() const {
  return !is_plain(parameter) || parameter.scalar_type() != dtype_of_parameter() ||
         (row_major && !parameter.is_contiguous());
}

GRADACCUM_INLINE at::ScalarType DeviceOperand::dtype_of_parameter() const {
  return by_kernel ? parameter.scalar_type() : state_type(parameter);
}

GRADACCUM_INLINE bool DeviceOperand::copies_gradient(bool multiplied) const {
  return (multiplied && !by_kernel) || gradient.scalar_type() != dtype_of_gradient() || !is_plain(gradient) ||
         !(row_major ? gradient.is_contiguous() : same_order(parameter, gradient));
}

GRADACCUM_INLINE at::ScalarType DeviceOperand::dtype_of_gradient() const {
  return by_kernel && gradient.scalar_type() == parameter.scalar_type() ? parameter.scalar_type()
                                                                        : state_type(parameter);
}

GRADACCUM_INLINE Extent DeviceOperand::whole() const {
  return {0, parameter.is_complex() ? 2 * parameter.numel() : parameter.numel(), /*whole=*/true};
}

GRADACCUM_INLINE at::Tensor DeviceOperand::layout() const {
  if (!row_major || parameter.is_contiguous()) return plain_layout_of(parameter);
  return at::empty(parameter.sizes(), parameter.options().device(at::kMeta));
}

GRADACCUM_INLINE std::vector<Extent> DeviceOperand::cut() const {
  const auto all = whole();
  const bool lie_alike = is_plain(parameter) && is_plain(gradient) && same_order(parameter, gradient);
  if (all.size() <= most_copied || !lie_alike || row_major) return {all};
  std::vector<Extent> extents;
  for (std::int64_t from = 0; from < all.to; from += most_copied)
    extents.push_back({from, std::min(from + most_copied, all.to), /*whole=*/false});
  return extents;
}

GRADACCUM_INLINE std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier) {
  if (!multiplier.found_inf.defined()) return {};
  return multiplier.found_inf.to(device, /*non_blocking=*/true);
}

GRADACCUM_INLINE at::Tensor left_out_on(at::Device device, const Multiplier& multiplier) {
  const auto found_inf = found_inf_on(device, multiplier);
  return found_inf ? found_inf->to(at::kBool) : at::Tensor();
}

GRADACCUM_INLINE void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits,
                                            at::Tensor is_nan) {
  auto generator = at::globalContext().defaultGenerator(numbers.device()).clone();
  generator.set_current_seed(key);
  at::ne_out(is_nan, numbers, numbers);
  random_bits.random_(0, 1 << 16, generator).add_(numbers.view(at::kInt)).bitwise_and_(-(1 << 16));
  auto result = numbers;
  at::where_out(result, is_nan, numbers, random_bits.view(at::kFloat));
}

GRADACCUM_INLINE void DeviceOperands::add(const DeviceOperand& operand, const Extent& extent) {
  Part part{
      .of = operand, .layout = {}, .parameter = extent.of(operand.parameter), .gradient = extent.of(operand.gradient)};
  // Rounds each part of a parameter with different random numbers.
  if (part.of.rounding_key) *part.of.rounding_key += static_cast<std::uint64_t>(extent.from);
  part.layout = extent.whole ? operand.layout() : plain_layout_of(part.parameter);
  if (!by_.on_host() && !factor_.defined()) {
    wide_factor_ = by_.on(part.parameter.device());
    factor_ = wide_factor_.to(at::toRealValueType(state_type(part.parameter)));
  }
  parts_.push_back(std::move(part));
}

GRADACCUM_INLINE void DeviceOperands::take(Scratch& scratch) {
  for (auto& part : parts_) {
    const auto take = [&](at::ScalarType dtype) {  // a part of a complex tensor has real numbers
      return scratch.take(part.layout, part.parameter.is_complex() ? dtype : at::toRealValueType(dtype));
    };
    if (part.of.copies_parameter()) part.parameter_copy = take(part.of.dtype_of_parameter());
    if (part.of.copies_gradient(!by_.is_one())) part.gradient_copy = take(part.of.dtype_of_gradient());
    if (!part.of.rounding_key || part.of.by_kernel) continue;
    part.random_bits = scratch.take(part.layout, at::kInt);
    part.is_nan = scratch.take(part.layout, at::kBool);
  }
}

GRADACCUM_INLINE void DeviceOperands::read() {
  std::vector<at::Tensor> parameter_copies, parameters, gradient_copies, gradients, lazy;
  for (auto& part : parts_) {
    if (part.parameter_copy.defined()) {
      parameter_copies.push_back(part.parameter_copy);
      parameters.push_back(part.parameter);
    }
    if (!part.gradient_copy.defined()) continue;
    const bool wide = part.gradient.element_size() > part.gradient_copy.element_size();
    if (wide && !by_.is_one()) {  // may exceed the copy's dtype before it is multiplied
      at::mul_out(part.gradient_copy, part.gradient,
                  by_.on_host() ? at::scalar_tensor(by_.host(), at::kDouble) : wide_factor_);
    } else if (part.gradient.is_conj() || part.gradient.is_neg() || part.gradient._is_zerotensor()) {
      lazy.push_back(part.gradient_copy.copy_(part.gradient));  // foreach operations would copy these
    } else {
      gradient_copies.push_back(part.gradient_copy);
      gradients.push_back(part.gradient);
    }
  }
  if (!parameters.empty()) at::_foreach_copy_(parameter_copies, parameters);
  if (!gradients.empty()) at::_foreach_copy_(gradient_copies, gradients);
  gradient_copies.insert(gradient_copies.end(), lazy.begin(), lazy.end());
  if (by_.is_one() || gradient_copies.empty()) return;
  for (auto& copy : gradient_copies) copy = as_real(copy);
  by_.on_host() ? at::_foreach_mul_(gradient_copies, by_.host()) : at::_foreach_mul_(gradient_copies, factor_);
}

GRADACCUM_INLINE std::vector<at::Tensor> DeviceOperands::parameters() const {
  std::vector<at::Tensor> all;
  for (auto& part : parts_) all.push_back(as_real(part.stepped()));
  return all;
}

GRADACCUM_INLINE std::vector<at::Tensor> DeviceOperands::gradients() const {
  std::vector<at::Tensor> all;
  for (auto& part : parts_) all.push_back(as_real(part.gradient_copy.defined() ? part.gradient_copy : part.gradient));
  return all;
}

GRADACCUM_INLINE void DeviceOperands::write_back() const {
  for (auto& part : parts_) {
    if (part.of.rounding_key && !part.of.by_kernel)
      round_stochastically_(part.parameter_copy, *part.of.rounding_key, part.random_bits, part.is_nan);
    detail::write_back(part.parameter, part.stepped());
  }
}

}  // namespace gradaccum::detail
