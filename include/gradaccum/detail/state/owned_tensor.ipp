// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/owned_tensor.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

namespace gradaccum::detail {

/// Returns true for a tensor that spans all of its CPU storage, allocated by LibTorch rather than borrowed.
GRADACCUM_INLINE bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.has_storage() && tensor.storage().resizable() &&
         tensor.storage().allocator() == c10::GetAllocator(c10::kCPU) && tensor.storage_offset() == 0 &&
         tensor.is_contiguous() && tensor.nbytes() == tensor.storage().nbytes();
}

/// Returns true if the caller holds the only reference to the tensor and its memory.
GRADACCUM_INLINE bool is_alone(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && has_plain_memory(tensor) && tensor.storage().use_count() == 1;
}

GRADACCUM_INLINE at::Tensor owned(at::Tensor tensor) {
  if (!tensor.defined() || (is_alone(tensor) && !tensor.requires_grad())) return tensor;
  return tensor.detach().clone();
}

GRADACCUM_INLINE void load_into(const at::Tensor& to, const at::Tensor& loaded) {
  const at::NoGradGuard no_grad;
  const bool can_swap = is_alone(loaded) && has_plain_memory(to) && !to.is_inference() &&
                        to.dtype() == loaded.dtype() && to.sizes() == loaded.sizes();
  if (!can_swap) {
    to.copy_(loaded);
    return;
  }
  auto &here = *to.storage().unsafeGetStorageImpl(), &there = *loaded.storage().unsafeGetStorageImpl();
  there.set_data_ptr_noswap(here.set_data_ptr(there.set_data_ptr({})));
  to.unsafeGetTensorImpl()->bump_version();  // like copy_(): autograd must notice if it has saved the tensor
}

}  // namespace gradaccum::detail
