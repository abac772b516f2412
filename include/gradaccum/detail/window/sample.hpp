// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum::detail {

/// Hashes a few bytes of a tensor's memory, which most likely shows a write to the tensor, even one that bypasses
/// LibTorch's version counters. 0 if the host cannot read the memory without waiting.
std::uint64_t sample_of(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/sample.ipp>
#endif
