// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/batch_on_device.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/copied_to.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

/// Blocks for copies to the host, whose readers would not wait for them.
GRADACCUM_INLINE at::Tensor brought_to(c10::Device device, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device() == device) return tensor;
  if (tensor.is_cpu() && tensor.layout() == at::kStrided) return copied_to(device, tensor);
  return tensor.to(device, /*non_blocking=*/device.is_cuda());
}

GRADACCUM_INLINE void cannot_be_brought(const std::type_info& type) {
  TORCH_CHECK(
      false,
      "Prefetch: with .device a batch must consist of tensors: one, a tuple, a range or a map of them, or .data "
      "and .target and nothing else, got ",
      name_of_class(type), ": give the class a Batch to(at::Device) const");
}

}  // namespace gradaccum::detail
