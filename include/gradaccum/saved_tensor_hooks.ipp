// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/saved_tensor_hooks.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE void PackedTensor::call_pack_hook(const at::Tensor& tensor) {
  version_ = TensorVersion(tensor);
  traits_ = TensorTraits(tensor);
  // Detaches results: an operation that owned its own result would never be freed.
  pack(tensor.is_leaf() ? tensor : tensor.tensor_data());
}

GRADACCUM_INLINE at::Tensor PackedTensor::call_unpack_hook() {
  TORCH_CHECK(!version_.changed(), "SavedTensorHooks: a tensor that backward needs (", traits_,
              ") must not change in place after it was saved; clone it before");
  at::Tensor tensor = unpack();
  TORCH_CHECK(tensor.defined() && TensorTraits(tensor) == traits_,
              "SavedTensorHooks: unpack must return what was packed, ", traits_, ", got ",
              tensor.defined() ? c10::str(TensorTraits(tensor)) : "an undefined tensor");
  return tensor;
}

}  // namespace gradaccum::detail
