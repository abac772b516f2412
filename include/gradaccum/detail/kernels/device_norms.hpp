// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum::detail {

/// Memory of a device that one stream uses again and again.
class StreamMemory {
 public:
  /// Gives `numbers` of float64 for the current stream of a device: the same ones as before, if nobody else has them.
  at::Tensor take(std::int64_t numbers, at::Device device);

 private:
  at::Tensor memory_;
  void* stream_ = nullptr;
};

/// Says whether a kernel of our own takes the tensor.
bool can_be_normed_on_device(const at::Tensor& tensor);

/// The L2 norm of each, in float64: of tensors on one device for which `can_be_normed_on_device`. The bits depend on
/// nothing but the tensor. Does not wait for the device. The result lies in `memory`.
at::Tensor l2_norms_on_device(const std::vector<at::Tensor>& tensors, StreamMemory& memory);

/// A WindowNorm of these norms as three numbers of float64, and its parts, which are views of it. Does not wait for the
/// device.
at::Tensor window_norm_on_device(const at::Tensor& norms, const DeviceMultiplier& by, double max_norm);
inline at::Tensor norm_in(const at::Tensor& window_norm) { return window_norm.select(0, 0); }
inline at::Tensor clip_coefficient_in(const at::Tensor& window_norm) { return window_norm.select(0, 1); }
inline at::Tensor found_inf_in(const at::Tensor& window_norm) { return window_norm.view(at::kFloat).select(0, 4); }

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/device_norms.ipp>
#endif
