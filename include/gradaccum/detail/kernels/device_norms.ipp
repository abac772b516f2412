// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_norms.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/kernels/kernel_proof.hpp>

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>

namespace gradaccum::detail {

/// Launches of tensors of one dtype, whose norms go to where `norms` points.
GRADACCUM_INLINE void launch_norms(const DeviceKernels& kernels, const std::vector<at::Tensor>& tensors, double* norms,
                                   double* partial_sums, void* stream) {
  SquaresLaunch launch(partial_sums, norms);
  const auto run = [&] {
    kernels.l2_norms(launch, tensors.front().scalar_type(), stream);
    launch = SquaresLaunch(launch.partial_sums + launch.blocks, launch.norms + launch.size);
  };
  for (auto& tensor : tensors) {
    if (launch.full()) run();
    launch.add(tensor.const_data_ptr(), tensor.numel());
  }
  run();
}

GRADACCUM_INLINE at::Tensor l2_norms_by(const DeviceKernels& kernels, const std::vector<at::Tensor>& tensors) {
  const auto device = tensors.front().device();
  const c10::DeviceGuard guard(device);
  std::int64_t blocks = 0;
  for (auto& tensor : tensors) blocks += blocks_of_elements(tensor.numel());
  const auto count = static_cast<std::int64_t>(tensors.size());
  const auto memory = at::empty({count + blocks}, at::TensorOptions(at::kDouble).device(device));
  const auto norms = memory.narrow(0, 0, count);
  launch_norms(kernels, tensors, norms.mutable_data_ptr<double>(), norms.mutable_data_ptr<double>() + count,
               native_stream(device));
  return norms;
}

/// Waits for the device.
GRADACCUM_INLINE bool norms_as_aten(const DeviceKernels& kernels, const at::Tensor& like) {
  std::vector<at::Tensor> tensors;
  for (auto& numbers : all_trial_numbers(like.device())) tensors.push_back(numbers.of(like.scalar_type()));
  const auto close = [](const at::Tensor& norms) { return TrialResult{norms, 1e-7, 0}; };
  return are_close({close(l2_norms_by(kernels, tensors))},
                   {close(at::stack(at::_foreach_norm(tensors, 2, at::kDouble)))});
}

GRADACCUM_INLINE bool can_be_normed_on_device(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  const auto* const kernels = device_kernels();
  return kernels && tensor.is_cuda() && tensor.is_non_overlapping_and_dense() && !tensor._is_zerotensor() &&
         has_kernels(dtype) && is_proved(*kernels, tensor.device(), "L2 norms", {dtype, dtype, false}, [&] {
           return norms_as_aten(*kernels, tensor);
         });
}

GRADACCUM_INLINE at::Tensor l2_norms_on_device(const std::vector<at::Tensor>& tensors) {
  return l2_norms_by(*device_kernels(), tensors);
}

}  // namespace gradaccum::detail
