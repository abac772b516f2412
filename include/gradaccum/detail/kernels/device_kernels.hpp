// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace gradaccum::detail {

/// Returns the kernels for CUDA devices, which `gradaccum::compiled` has if CMake found a CUDA compiler, else nullptr.
const DeviceKernels* device_kernels();
/// Replaces the kernels, or removes them (nullptr).
void set_device_kernels(const DeviceKernels* kernels);

/// Returns the device's current stream, on which kernels are launched.
void* native_stream(c10::Device device);

/// Device memory that one stream reuses.
class StreamMemory {
 public:
  /// Returns at least `numbers` float64 numbers for the current stream: the previous ones unless still referenced.
  at::Tensor take(std::int64_t numbers, at::Device device);

 private:
  at::Tensor memory_;
  void* stream_ = nullptr;
};

/// Returns true if one of this library's kernels accepts the tensor.
bool can_be_normed_on_device(const at::Tensor& tensor);

/// Computes the L2 norms, in float64, of tensors on one device, each of which `can_be_normed_on_device`. The bits of a
/// norm depend only on its tensor. Does not synchronize. The result is stored in `memory`.
at::Tensor l2_norms_on_device(const std::vector<at::Tensor>& tensors, StreamMemory& memory);

/// Computes a WindowNorm, as three float64 numbers of which its parts are views. Does not synchronize.
at::Tensor window_norm_on_device(const at::Tensor& norms, const DeviceMultiplier& by, double max_norm);
inline at::Tensor norm_in(const at::Tensor& window_norm) { return window_norm.select(0, 0); }
inline at::Tensor clip_coefficient_in(const at::Tensor& window_norm) { return window_norm.select(0, 1); }
inline at::Tensor found_inf_in(const at::Tensor& window_norm) { return window_norm.view(at::kFloat).select(0, 4); }

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/kernels/kernels.ipp>
#endif
