// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_norms.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

/// Launches kernels for tensors of one dtype, whose norms are written to `norms`.
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

GRADACCUM_INLINE bool can_be_normed_on_device(const at::Tensor& tensor) {
  return device_kernels() && tensor.is_cuda() && tensor.is_non_overlapping_and_dense() && !tensor._is_zerotensor() &&
         has_kernels(tensor.scalar_type());
}

GRADACCUM_INLINE at::Tensor StreamMemory::take(std::int64_t numbers, at::Device device) {
  auto* const stream = native_stream(device);
  const bool fits = memory_.defined() && memory_.numel() >= numbers && memory_.device() == device &&
                    stream_ == stream && memory_.use_count() == 1 && memory_.storage().use_count() == 1;
  if (!fits) {
    memory_ = at::empty({numbers}, at::TensorOptions(at::kDouble).device(device));
    stream_ = stream;
  }
  return memory_;
}

GRADACCUM_INLINE at::Tensor l2_norms_on_device(const std::vector<at::Tensor>& tensors, StreamMemory& memory) {
  const auto device = tensors.front().device();
  const c10::DeviceGuard guard(device);
  std::int64_t blocks = 0;
  for (auto& tensor : tensors) blocks += blocks_of_elements(tensor.numel());
  const auto count = static_cast<std::int64_t>(tensors.size());
  const auto norms = memory.take(count + blocks, device).narrow(0, 0, count);
  auto* const numbers = norms.mutable_data_ptr<double>();
  launch_norms(*device_kernels(), tensors, numbers, numbers + count, native_stream(device));
  return norms;
}

GRADACCUM_INLINE at::Tensor window_norm_on_device(const at::Tensor& norms, const DeviceMultiplier& by,
                                                  double max_norm) {
  static_assert(sizeof(WindowNorm) == 3 * sizeof(double) && offsetof(WindowNorm, clip_coefficient) == sizeof(double) &&
                offsetof(WindowNorm, found_inf) == 4 * sizeof(float));
  const c10::DeviceGuard guard(norms.device());
  auto result = at::empty({3}, norms.options());
  device_kernels()->window_norm({norms.const_data_ptr<double>(), norms.numel(), by, max_norm,
                                 static_cast<WindowNorm*>(result.mutable_data_ptr())},
                                native_stream(norms.device()));
  return result;
}

}  // namespace gradaccum::detail
