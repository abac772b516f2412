// SPDX-License-Identifier: Apache-2.0
// Computes norms of gradients, and multiplies gradients by a factor that may be partly on a device.
#pragma once

#include <gradaccum/detail/window/multiplier.hpp>

#include <gradaccum/detail/kernels/kernel_loop.hpp>

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns a gradient's numbers as a dense real tensor that shares its memory. Duplicates in a sparse one stay
/// separate.
GRADACCUM_INLINE at::Tensor elements(const at::Tensor& gradient) {
  TORCH_CHECK(gradient.layout() == at::kStrided || gradient.is_sparse(),
              "Gradients: a gradient must be dense or sparse COO, got layout ", gradient.layout());
  auto values = gradient.is_sparse() ? gradient._values() : gradient;
  if (!values.is_complex()) return values;
  return at::view_as_real(values.is_conj() ? values.conj() : values);  // backward often leaves a lazy conjugate
}

/// Groups tensors that one foreach operation can take.
GRADACCUM_INLINE std::vector<std::vector<at::Tensor>> by_device_and_dtype(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> groups;
  for (auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const auto group = std::ranges::find_if(groups, [&](auto& of) {
      return of.front().device() == tensor.device() && of.front().scalar_type() == tensor.scalar_type();
    });
    (group == groups.end() ? groups.emplace_back() : *group).push_back(tensor);
  }
  return groups;
}

GRADACCUM_INLINE at::Tensor norms(const std::vector<at::Tensor>& gradients, double p, StreamMemory* memory) {
  std::vector<SquaredNumbers> on_cpu;  // duplicates in a sparse gradient count as their sum
  std::vector<at::Tensor> by_kernel, others, found;
  for (auto& gradient : gradients) {
    const auto summed = gradient.is_sparse() ? gradient.coalesce() : gradient;
    const auto numbers = elements(summed);
    if (numbers.numel() == 0) continue;
    if (p == 2 && can_be_summed_here(numbers)) {
      auto& squares = on_cpu.emplace_back(SquaredNumbers{numbers});
      if (summed.is_sparse() && summed.sparse_dim() == 1 && numbers.is_contiguous())  // in a dense tensor's order
        squares = {numbers, summed._indices()[0].contiguous(), summed.size(0)};
    } else if (p == 2 && can_be_normed_on_device(numbers)) {
      by_kernel.push_back(numbers);
    } else {
      others.push_back(numbers);
    }
  }
  for (auto& group : by_device_and_dtype(by_kernel)) {
    StreamMemory of_others;
    found.push_back(l2_norms_on_device(group, memory && found.empty() ? *memory : of_others));
  }
  for (auto& group : by_device_and_dtype(others))
    for (auto& norm : at::_foreach_norm(group, p, at::kDouble)) found.push_back(norm.reshape({1}));
  if (!on_cpu.empty()) {  // without the float64 copies that ATen would make
    auto roots = sums_of_squares(on_cpu);
    for (auto& root : roots) root = std::sqrt(root);
    found.push_back(at::tensor(roots, at::TensorOptions(at::kDouble)));
  }
  if (found.empty()) found.push_back(at::zeros({1}, at::TensorOptions(at::kDouble)));
  if (found.size() == 1) return found.front();
  auto device = found.front().device();  // prefers a device, since a copy to it need not synchronize
  for (auto& norm : found)
    if (!norm.device().is_cpu()) device = norm.device();
  for (auto& norm : found) norm = norm.to(device, /*non_blocking=*/true);
  return at::cat(found);
}

// Reductions of a few numbers use no operations on the CPU: each would take as long as a pass over a small model.

GRADACCUM_INLINE at::Tensor l2_norm_of(const at::Tensor& norms) {
  if (!norms.device().is_cpu()) return norms.norm();
  const auto* const all = norms.const_data_ptr<double>();
  double largest = 0, sum = 0;  // scaled, so that no square overflows
  for (std::int64_t i = 0; i < norms.numel(); ++i) largest = all[i] <= largest ? largest : all[i];
  const double scale = largest > 0 && detail::is_finite(largest) ? largest : 1.0;
  for (std::int64_t i = 0; i < norms.numel(); ++i) sum += (all[i] / scale) * (all[i] / scale);
  return at::scalar_tensor(std::sqrt(sum) * scale, at::TensorOptions(at::kDouble));
}

/// Multiplies 16-bit gradients by a 0-dim float32 tensor on the CPU, or in float32 on a device: ATen first rounds a
/// Scalar, and a 0-dim tensor on CUDA, to 16 bits.
GRADACCUM_INLINE void multiply_(const std::vector<at::Tensor>& gradients, const Multiplier& by) {
  std::vector<at::Tensor> all;
  for (auto& gradient : gradients) all.push_back(elements(gradient));
  for (auto& group : by_device_and_dtype(all)) {
    const bool wide = group.front().element_size() > 2;
    if (wide && by.on_host()) {
      at::_foreach_mul_(group, by.host());
    } else if (wide) {
      at::_foreach_mul_(group, by.on(group.front().device()).to(group.front().scalar_type()));
    } else {
      const auto factor = by.on(by.on_host() ? at::Device(at::kCPU) : group.front().device()).to(at::kFloat);
      for (auto& tensor : group) by.on_host() ? tensor.mul_(factor) : tensor.copy_(tensor.to(at::kFloat).mul_(factor));
    }
  }
}

GRADACCUM_INLINE at::Tensor Multiplier::on(at::Device device) const {
  const auto number = [&](double value) { return at::full({}, value, at::TensorOptions(at::kDouble).device(device)); };
  auto product = number(device_denominator.defined() ? numerator : host());
  if (device_numerator.defined()) product.mul_(device_numerator.to(device));
  if (device_denominator.defined()) product.div_(number(denominator).mul_(device_denominator.to(device)));
  return product;
}

GRADACCUM_INLINE Multiplier Multiplier::moved_to(at::Device device) const {
  auto moved = *this;
  for (auto* const known : {&moved.device_numerator, &moved.device_denominator, &moved.found_inf, &moved.skipped_steps})
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
  return {numerator,       denominator,        number(device_numerator), number(device_denominator),
          flag(found_inf), flag(skipped_steps)};
}

/// Returns true if squares of finite gradients may overflow, as in float64.
GRADACCUM_INLINE bool squares_may_overflow(const std::vector<at::Tensor>& gradients) {
  return std::ranges::any_of(gradients,
                             [](auto& gradient) { return at::toRealValueType(gradient.scalar_type()) == at::kDouble; });
}

GRADACCUM_INLINE at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const at::Tensor& l2_norms) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto sizes = squares_may_overflow(gradients) ? norms(gradients, infinity) : l2_norms;
  if (!sizes.device().is_cpu()) return sizes.isfinite().all().logical_not().to(at::kFloat);
  const auto* const all = sizes.const_data_ptr<double>();
  const bool finite = std::all_of(all, all + sizes.numel(), [](double size) { return detail::is_finite(size); });
  return at::scalar_tensor(finite ? 0.0 : 1.0, at::TensorOptions(at::kFloat));
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
