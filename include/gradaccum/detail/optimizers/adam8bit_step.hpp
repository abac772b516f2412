// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/optimizers/adam_step.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

/// A tensor of moments in 8 bits: a code for each element, in the order of the parameter's memory, and the largest
/// magnitude of each block of `eight_bit_block` of them.
struct Codes {
  at::Tensor codes, scales;
};

std::int64_t blocks_of(const at::Tensor& tensor);

/// All zero, with the sizes and strides of `like`, which is plain.
Codes zero_codes(const at::Tensor& like, bool is_signed);

/// The elements of a plain tensor as they lie in memory, in rows of a block each, the last filled up.
at::Tensor in_blocks(const at::Tensor& plain, double fill);

/// What the codes stand for: float32, on any device.
at::Tensor decoded(const Codes& moments, bool is_signed);

/// Codes of a plain float32 tensor, on any device. Of two values as near, the smaller (in the kernels: the one nearer
/// to 0).
Codes encoded(const at::Tensor& numbers, bool is_signed);

/// Moments of `parameter` in the order of its elements; made if there are none. What was loaded is checked.
Codes settled(const Codes& moments, const at::Tensor& parameter, bool is_signed, const char* name);

/// One parameter's step with moments of 8 bits.
struct Adam8bitStep {
  AdamSettings settings;
  at::Tensor parameter, gradient;
  Codes exp_avg, exp_avg_sq;
  std::optional<std::uint64_t> rounding_key = {};  ///< of stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< whose moments these are; none: of all
};

/// With the state so far, whose tensors may be undefined. A sparse gradient moves rows, where that can be done and rows
/// are whole blocks.
Adam8bitStep adam8bit_step_of(const AdamSettings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
                              const Codes& exp_avg, const Codes& exp_avg_sq, const Multiplier& multiplier);

/// On the CPU, all in one parallel loop, a block at a time: decoded, stepped and coded again while it is in the cache.
void take_on_cpu(const std::vector<Adam8bitStep>& steps, double multiplier);
/// By kernels of our own where there are any, else by ATen.
void add_moves(Moves& moves, const std::vector<Adam8bitStep>& steps, const Multiplier& multiplier);
/// By ATen's fused operation on moments that are decoded for it, some of them at a time.
void add_aten_moves(Moves& moves, const std::vector<Adam8bitStep>& steps, const Multiplier& multiplier);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adam8bit_step.ipp>
#endif
