// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam8bit_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>

#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <limits>

namespace gradaccum::detail {

GRADACCUM_INLINE std::int64_t blocks_of(const at::Tensor& tensor) {
  return (tensor.numel() + eight_bit_block - 1) / eight_bit_block;
}

GRADACCUM_INLINE Codes zero_codes(const at::Tensor& like, bool is_signed) {
  return {at::empty_strided(like.sizes(), like.strides(), like.options().dtype(at::kByte)).fill_(is_signed * zero_code),
          at::zeros({blocks_of(like)}, like.options().dtype(at::kFloat))};
}

/// The elements of a plain tensor one after another, as they lie in memory.
GRADACCUM_INLINE at::Tensor flat(const at::Tensor& plain) { return plain.as_strided({plain.numel()}, {1}); }
GRADACCUM_INLINE at::Tensor in_blocks(const at::Tensor& plain, double fill) {
  const auto missing = blocks_of(plain) * eight_bit_block - plain.numel();
  return at::constant_pad_nd(flat(plain), {0, missing}, fill).view({-1, eight_bit_block});
}

GRADACCUM_INLINE const DynamicMap& map_of(bool is_signed) { return is_signed ? signed_map() : second_moment_map(); }

GRADACCUM_INLINE at::Tensor decoded(const Codes& moments, bool is_signed) {
  const auto values = at::tensor(at::ArrayRef<float>(map_of(is_signed).values)).to(moments.codes.device());
  const auto blocks = values.index_select(0, in_blocks(moments.codes, is_signed * zero_code).view({-1}).to(at::kLong))
                          .view({-1, eight_bit_block})
                          .mul_(moments.scales.unsqueeze(1));
  const auto& like = moments.codes;
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(at::kFloat))
      .copy_(blocks.view({-1}).slice(0, 0, like.numel()).as_strided(like.sizes(), like.strides()));
}

/// The middles between successive values: a number has the code of how many of them are below it.
GRADACCUM_INLINE at::Tensor middles_of(const DynamicMap& map) {
  std::array<float, 255> middles;
  for (std::size_t i = 0; i < middles.size(); ++i) middles[i] = map.values[i] + (map.values[i + 1] - map.values[i]) / 2;
  if (map.edge[0] == 0) middles[0] = 0;  // second moments
  return at::tensor(at::ArrayRef<float>(middles));
}

GRADACCUM_INLINE Codes encoded(const at::Tensor& numbers, bool is_signed) {
  auto codes = zero_codes(numbers, is_signed);
  if (numbers.numel() == 0) return codes;
  const auto blocks = in_blocks(numbers, 0);
  codes.scales = blocks.abs().amax(1);
  const auto usable = codes.scales.ge(std::numeric_limits<float>::min());
  const auto by = at::where(usable, codes.scales.reciprocal(), at::zeros({}, codes.scales.options()));
  const auto indices = at::bucketize(blocks.mul(by.unsqueeze(1)), middles_of(map_of(is_signed)).to(numbers.device()));
  flat(codes.codes).copy_(indices.view({-1}).slice(0, 0, numbers.numel()));
  return codes;
}

GRADACCUM_INLINE Codes settled(const Codes& moments, const at::Tensor& parameter, bool is_signed, const char* name) {
  const auto like = is_plain(parameter) ? parameter : at::empty_like(parameter, parameter.options().device(at::kMeta));
  if (!moments.codes.defined())
    return zero_codes(like.is_meta() ? at::empty_strided(like.sizes(), like.strides(), parameter.options()) : like,
                      is_signed);
  const auto& [codes, scales] = moments;
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

GRADACCUM_INLINE void take_on_cpu(const std::vector<Adam8bitStep>& steps, double multiplier) {
  KernelLoop<Adam8bitOperand> loop(steps.size(), eight_bit_block);
  for (auto& s : steps) {
    Adam8bitOperand operand{.numbers = numbers_of(s.settings, multiplier),
                            .exp_avg = s.exp_avg.codes.mutable_data_ptr<std::uint8_t>(),
                            .exp_avg_sq = s.exp_avg_sq.codes.mutable_data_ptr<std::uint8_t>(),
                            .exp_avg_scale = s.exp_avg.scales.mutable_data_ptr<float>(),
                            .exp_avg_sq_scale = s.exp_avg_sq.scales.mutable_data_ptr<float>()};
    loop.add(operand, adam8bit_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

GRADACCUM_INLINE void take_on_device(const std::vector<Adam8bitStep>& steps, const Multiplier& multiplier) {
  for (auto& s : steps) {
    const AdamStep whole{
        s.settings,   s.parameter,   s.gradient, decoded(s.exp_avg, true), decoded(s.exp_avg_sq, false),
        at::Tensor(), s.rounding_key};
    take_on_device(std::vector<AdamStep>{whole}, multiplier);
    const auto write = [](const Codes& from, const Codes& to) {
      to.codes.copy_(from.codes);
      to.scales.copy_(from.scales);
    };
    write(encoded(whole.exp_avg, true), s.exp_avg);
    write(encoded(whole.exp_avg_sq, false), s.exp_avg_sq);
  }
}

}  // namespace gradaccum::detail
