// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/scratch.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/empty.h>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE at::Tensor Scratch::take(std::int64_t elements, at::ScalarType dtype) {
  constexpr std::int64_t alignment = 256;  // for operations that read several elements at once
  const auto bytes = elements * static_cast<std::int64_t>(at::elementSize(dtype)), from = used_;
  used_ += (bytes + alignment - 1) / alignment * alignment;
  most_ = std::max(most_, used_);
  return memory_.defined() ? memory_.narrow(0, from, bytes).view(dtype) : at::Tensor();
}

GRADACCUM_INLINE at::Tensor Scratch::take(const at::Tensor& like, at::ScalarType dtype) {
  const auto memory = take(like.numel(), dtype);
  return memory.defined() ? memory.as_strided(like.sizes(), like.strides()) : memory;
}

GRADACCUM_INLINE void Scratch::allocate() {
  memory_ = at::empty({most_}, at::TensorOptions(at::kByte).device(device_));
}

}  // namespace gradaccum::detail
