// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes 8-bit moments on any device, and checks the moments of a loaded state.
#pragma once

#include <gradaccum/detail/optimizers/eight_bit_moments.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>

#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::int64_t blocks_of(const at::Tensor& tensor) { return eight_bit_blocks(tensor.numel()); }

GRADACCUM_INLINE Codes zero_codes(const at::Tensor& like, at::Device device, bool is_signed) {
  const at::TensorOptions on(device);
  return {at::empty_strided(like.sizes(), like.strides(), on.dtype(at::kByte)).fill_(is_signed * zero_code),
          at::zeros({blocks_of(like)}, on.dtype(at::kFloat))};
}

/// Returns a plain tensor's elements in memory order, as whole blocks; zeros fill the last block.
GRADACCUM_INLINE at::Tensor blocks_in(const at::Tensor& plain) {
  const auto blocks = blocks_of(plain);
  const auto missing = blocks * eight_bit_block - plain.numel();
  return at::constant_pad_nd(plain.as_strided({plain.numel()}, {1}), {0, missing}).view({blocks, eight_bit_block});
}

/// Returns the number of each code, relative to its block's scale.
GRADACCUM_INLINE at::Tensor numbers_of_codes(bool is_signed) {
  return at::tensor(at::ArrayRef<float>((is_signed ? signed_map() : second_moment_map()).values));
}

GRADACCUM_INLINE at::Tensor decoded(const Codes& moments, bool is_signed) {
  const auto& like = moments.codes;
  const auto codes = blocks_in(like), values = copied_to(like.device(), numbers_of_codes(is_signed));
  const auto numbers = values.index_select(0, codes.flatten().to(at::kInt)).view_as(codes);
  return numbers.mul(moments.scales.unsqueeze(1)).as_strided(like.sizes(), like.strides());
}

GRADACCUM_INLINE Codes encoded(const at::Tensor& numbers, bool is_signed) {
  const auto values = numbers_of_codes(is_signed);
  // The midpoints of successive values: the code of a number is the count of midpoints below it.
  const auto middles = values.slice(0, 0, 255).add(values.diff(), 0.5);
  if (!is_signed) middles.slice(0, 0, 1).zero_();  // second moments
  auto codes = zero_codes(numbers, numbers.device(), is_signed);
  const auto blocks = blocks_in(numbers);
  codes.scales = blocks.abs().amax(1);
  const auto usable = codes.scales.ge(std::numeric_limits<float>::min());
  const auto by = codes.scales.reciprocal().masked_fill_(usable.logical_not(), 0);
  const auto indices = at::bucketize(blocks.mul(by.unsqueeze(1)), copied_to(numbers.device(), middles),
                                     /*out_int32=*/true);
  codes.codes.copy_(indices.as_strided(numbers.sizes(), numbers.strides()));
  return codes;
}

GRADACCUM_INLINE Codes checked_state(const Codes& moments, const at::Tensor& parameter, bool is_signed,
                                     const char* name) {
  const auto like = plain_layout_of(parameter);
  if (!moments.codes.defined()) return zero_codes(like, parameter.device(), is_signed);
  const auto& [codes, scales] = moments;
  TORCH_CHECK(state_type(parameter) == at::kFloat, "optimizer state: ", name, " must be floating for a parameter in ",
              parameter.scalar_type(), ", got 8-bit codes; the state was loaded for another model");
  TORCH_CHECK(codes.sizes() == parameter.sizes() && codes.scalar_type() == at::kByte && is_plain(codes) &&
                  scales.defined() && scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
                  scales.sizes() == at::IntArrayRef{blocks_of(parameter)} && codes.device() == parameter.device() &&
                  scales.device() == parameter.device(),
              "optimizer state: ", name, " must have codes of the shape and device of its parameter, ",
              parameter.sizes(), " on ", parameter.device(), ", and a scale for each ", eight_bit_block,
              "; the state was loaded for another model");
  if (same_order(like, codes)) return moments;
  return encoded(in_order_of(like, decoded(moments, is_signed), at::kFloat), is_signed);
}

GRADACCUM_INLINE Codes dense_of(const Codes& moments, bool is_signed) {
  if (!moments.codes.defined() || !moments.codes.is_sparse()) return moments;
  return {dense_of(moments.codes, is_signed ? zero_code : 0), dense_of(moments.scales).flatten()};
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
