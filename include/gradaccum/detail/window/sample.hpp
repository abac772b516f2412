// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum::detail {

/// A number made of a few bytes of a tensor's memory: who writes to the tensor, also past LibTorch's version counters,
/// most likely changes it. 0 where the host cannot look without waiting.
std::uint64_t sample_of(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/sample.ipp>
#endif
