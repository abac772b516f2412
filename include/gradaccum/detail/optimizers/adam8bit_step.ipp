// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam8bit_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>
#include <gradaccum/detail/memory/copied_to.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/optimizers/kernel_moves.hpp>

#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <limits>

namespace gradaccum::detail {

GRADACCUM_INLINE std::int64_t blocks_of(const at::Tensor& tensor) { return eight_bit_blocks(tensor.numel()); }

GRADACCUM_INLINE Codes zero_codes(const at::Tensor& like, bool is_signed) {
  return {at::empty_strided(like.sizes(), like.strides(), like.options().dtype(at::kByte)).fill_(is_signed * zero_code),
          at::zeros({blocks_of(like)}, like.options().dtype(at::kFloat))};
}

/// Returns a 1-D view of a plain tensor in memory order.
GRADACCUM_INLINE at::Tensor flat(const at::Tensor& plain) { return plain.as_strided({plain.numel()}, {1}); }
GRADACCUM_INLINE at::Tensor in_blocks(const at::Tensor& plain, double fill) {
  const auto missing = blocks_of(plain) * eight_bit_block - plain.numel();
  return at::constant_pad_nd(flat(plain), {0, missing}, fill).view({-1, eight_bit_block});
}

GRADACCUM_INLINE const DynamicMap& map_of(bool is_signed) { return is_signed ? signed_map() : second_moment_map(); }

/// Returns the midpoints of successive values. The code of a number is the count of midpoints below it.
GRADACCUM_INLINE std::array<float, 256> middles_of(const DynamicMap& map) {
  std::array<float, 256> middles;
  middles.back() = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < 255; ++i) middles[i] = map.values[i] + (map.values[i + 1] - map.values[i]) / 2;
  if (map.edge[0] == 0) middles[0] = 0;  // second moments
  return middles;
}

/// Decodes and encodes moments on a device.
class Coding {
 public:
  Coding(bool is_signed, at::Device device) : zero_(is_signed ? zero_code : 0) {
    const auto& values = map_of(is_signed).values;
    const auto middles = middles_of(map_of(is_signed));
    const auto both = copied_to(
        device, at::stack({at::tensor(at::ArrayRef<float>(values)), at::tensor(at::ArrayRef<float>(middles))}));
    values_ = both[0];
    middles_ = both[1].slice(0, 0, 255);
  }

  at::Device device() const { return values_.device(); }

  /// Decodes whole blocks into `numbers`; `codes` may end inside the last one. `places` is int32 scratch of equal size.
  void decode(const Codes& codes, at::Tensor numbers, const at::Tensor& places) const {
    places.fill_(zero_);
    places.slice(0, 0, codes.codes.numel()).copy_(codes.codes);
    at::index_select_out(numbers, values_, 0, places);
    numbers.view({-1, eight_bit_block}).mul_(codes.scales.unsqueeze(1));
  }

  /// Encodes `numbers`, and overwrites them. `places` and `usable`, a bool for each block, are scratch.
  void encode(const at::Tensor& numbers, Codes codes, at::Tensor places, at::Tensor usable) const {
    const auto blocks = numbers.view({-1, eight_bit_block});
    auto magnitudes = places.view(at::kFloat);
    auto shaped = magnitudes.view({-1, eight_bit_block});
    at::abs_out(shaped, blocks);
    at::amax_out(codes.scales, shaped, {1});
    auto by = magnitudes.slice(0, 0, codes.scales.numel());
    at::reciprocal_out(by, codes.scales);
    at::ge_out(usable, codes.scales, std::numeric_limits<float>::min());
    by.masked_fill_(usable.logical_not_(), 0);
    blocks.mul_(by.unsqueeze(1));
    at::bucketize_out(places, numbers, middles_, /*out_int32=*/true);
    codes.codes.copy_(places.slice(0, 0, codes.codes.numel()));
  }

 private:
  std::int64_t zero_;
  at::Tensor values_, middles_;
};

GRADACCUM_INLINE at::Tensor places_for(const at::Tensor& plain) {
  return at::empty({blocks_of(plain) * eight_bit_block}, plain.options().dtype(at::kInt));
}

GRADACCUM_INLINE at::Tensor decoded(const Codes& moments, bool is_signed) {
  const auto& like = moments.codes;
  const auto places = places_for(like), numbers = at::empty_like(places, at::kFloat);
  if (like.numel() > 0) Coding(is_signed, like.device()).decode({flat(like), moments.scales}, numbers, places);
  return at::empty_strided(like.sizes(), like.strides(), numbers.options())
      .copy_(numbers.as_strided(like.sizes(), like.strides()));
}

GRADACCUM_INLINE Codes encoded(const at::Tensor& numbers, bool is_signed) {
  auto codes = zero_codes(numbers, is_signed);
  if (numbers.numel() == 0) return codes;
  const auto blocks = in_blocks(numbers, 0).view({-1}).clone();
  Coding(is_signed, numbers.device())
      .encode(blocks, {flat(codes.codes), codes.scales}, places_for(numbers),
              at::empty({blocks_of(numbers)}, numbers.options().dtype(at::kBool)));
  return codes;
}

GRADACCUM_INLINE Codes settled(const Codes& moments, const at::Tensor& parameter, bool is_signed, const char* name) {
  const auto like = plain_layout_of(parameter);
  if (!moments.codes.defined())
    return zero_codes(like.is_meta() ? at::empty_strided(like.sizes(), like.strides(), parameter.options()) : like,
                      is_signed);
  const auto& [codes, scales] = moments;
  TORCH_CHECK(state_type(parameter) == at::kFloat, "optimizer state: ", name, " must be of floats for a parameter in ",
              parameter.scalar_type(), ", got codes of 8 bits; the state was loaded for another model");
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

GRADACCUM_INLINE std::vector<Moments> moments_of(const Codes& codes, const at::Tensor& parameter, bool is_signed) {
  const auto width = parameter.numel() / parameter.size(0);
  return {{codes.codes, at::kByte, width, is_signed ? zero_code : 0},
          {codes.scales, at::kFloat, width / eight_bit_block}};
}

/// Returns dense moments. Dense scales are 1-D.
GRADACCUM_INLINE Codes dense_of(const Codes& moments, bool is_signed) {
  if (!moments.codes.defined() || !moments.codes.is_sparse()) return moments;
  return {dense_of(moments.codes, is_signed ? zero_code : 0), dense_of(moments.scales).flatten()};
}

GRADACCUM_INLINE Adam8bitStep adam8bit_step_of(const AdamSettings& settings, const at::Tensor& parameter,
                                               const at::Tensor& gradient, const Codes& exp_avg,
                                               const Codes& exp_avg_sq, const Multiplier& multiplier) {
  const bool by_rows = steps_by_rows(settings, parameter, gradient, multiplier) &&
                       parameter.numel() / parameter.size(0) % eight_bit_block == 0;
  const auto settle = [&](const Codes& moments, bool is_signed, const char* name) {
    if (by_rows && (!moments.codes.defined() || moments.codes.is_sparse())) return moments;
    return settled(dense_of(moments, is_signed), parameter, is_signed, name);
  };
  Adam8bitStep step{settings, parameter, gradient, settle(exp_avg, true, "exp_avg"),
                    settle(exp_avg_sq, false, "exp_avg_sq")};
  if (!by_rows && gradient.is_sparse()) step.gradient = gradient.to_dense();
  if (!by_rows) return step;
  auto all = moments_of(step.exp_avg, parameter, true);
  for (auto& moments : moments_of(step.exp_avg_sq, parameter, false)) all.push_back(moments);
  step.rows = rows_of(parameter, gradient, all);
  step.exp_avg = {all[0].tensor, all[1].tensor};
  step.exp_avg_sq = {all[2].tensor, all[3].tensor};
  return step;
}

GRADACCUM_INLINE void take_rows_on_cpu(const Adam8bitStep& s, const Adam8bitOperand& operand) {
  const auto width = s.exp_avg.codes.size(1), bytes_of_scales = width / eight_bit_block * 4;
  take_rows(*s.rows, operand, adam8bit_kernel, s.parameter, s.rounding_key, moves_all_rows(s.settings),
            [&](Adam8bitOperand& of_row, const StepRows::Row& row) {
              for (auto* const codes : {&of_row.exp_avg, &of_row.exp_avg_sq})
                *codes = first_of_table(*codes, row.moments, row.number, width);
              for (auto* const scales : {&of_row.exp_avg_scale, &of_row.exp_avg_sq_scale})
                *scales = first_of_table(*scales, row.moments, row.number, bytes_of_scales);
            });
}

GRADACCUM_INLINE void take_on_cpu(const std::vector<Adam8bitStep>& steps, double multiplier) {
  KernelLoop<Adam8bitOperand> loop(steps.size(), eight_bit_block);
  for (auto& s : steps) {
    Adam8bitOperand operand{.numbers = numbers_of(s.settings, multiplier),
                            .exp_avg = s.exp_avg.codes.mutable_data_ptr<std::uint8_t>(),
                            .exp_avg_sq = s.exp_avg_sq.codes.mutable_data_ptr<std::uint8_t>(),
                            .exp_avg_scale = s.exp_avg.scales.mutable_data_ptr<float>(),
                            .exp_avg_sq_scale = s.exp_avg_sq.scales.mutable_data_ptr<float>()};
    if (s.rows)
      take_rows_on_cpu(s, operand);
    else
      loop.add(operand, adam8bit_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

/// The step of a parameter, or of whole blocks of it, on a device.
class Adam8bitMove final : public Move {
 public:
  Adam8bitMove(const StepPart<Adam8bitStep>& part, const Multiplier& multiplier, const Coding& first,
               const Coding& second)
      : operands_(multiplier),
        fused_(part.step.settings, multiplier, part.step.parameter.device()),
        left_out_(left_out_on(part.step.parameter.device(), multiplier)),
        first_(first),
        second_(second),
        exp_avg_(codes_of(part.step.exp_avg, part.extent)),
        exp_avg_sq_(codes_of(part.step.exp_avg_sq, part.extent)) {
    operands_.add(operand_of(part.step), part.extent);
  }

  void take(Scratch& scratch) override {
    operands_.take(scratch);
    const auto blocks = exp_avg_.scales.numel();
    places_ = scratch.take(blocks * eight_bit_block, at::kInt);
    m_ = scratch.take(blocks * eight_bit_block, at::kFloat);
    v_ = scratch.take(blocks * eight_bit_block, at::kFloat);
    usable_ = scratch.take(blocks, at::kBool);
    if (!left_out_.defined()) return;
    fresh_.codes = scratch.take(exp_avg_.codes.numel(), at::kByte);
    fresh_.scales = scratch.take(blocks, at::kFloat);
  }

  void run() override {
    operands_.read();
    first_.decode(exp_avg_, m_, places_);
    second_.decode(exp_avg_sq_, v_, places_);
    const auto p = operands_.parameters(), g = operands_.gradients();
    const auto like_p = [&](const at::Tensor& moments) { return moments.as_strided(p[0].sizes(), p[0].strides()); };
    fused_(p, g, {like_p(m_)}, {like_p(v_)}, {});
    encode(first_, m_, exp_avg_);
    encode(second_, v_, exp_avg_sq_);
    operands_.write_back();
  }

 private:
  static Codes codes_of(const Codes& all, const Extent& extent) {
    const auto codes = flat(all.codes).narrow(0, extent.from, extent.size());
    return {codes, all.scales.narrow(0, extent.from / eight_bit_block, blocks_of(codes))};
  }

  /// Encodes moments, but keeps the old codes if the step is skipped, since encoding may change them.
  void encode(const Coding& coding, const at::Tensor& numbers, Codes& codes) const {
    if (!left_out_.defined()) return coding.encode(numbers, codes, places_, usable_);
    coding.encode(numbers, fresh_, places_, usable_);
    at::where_out(codes.codes, left_out_, codes.codes, fresh_.codes);
    at::where_out(codes.scales, left_out_, codes.scales, fresh_.scales);
  }

  DeviceOperands operands_;
  FusedAdam fused_;
  at::Tensor left_out_;
  Coding first_, second_;
  Codes exp_avg_, exp_avg_sq_, fresh_;
  at::Tensor places_, m_, v_, usable_;
};

GRADACCUM_INLINE void add_aten_moves(Moves& moves, const std::vector<Adam8bitStep>& steps,
                                     const Multiplier& multiplier) {
  std::optional<Coding> first, second;
  for (auto& step : steps) {
    const auto device = step.parameter.device();
    if (!first || first->device() != device) {
      first.emplace(true, device);
      second.emplace(false, device);
    }
    if (step.parameter.numel() == 0) continue;
    for (auto& extent : operand_of(step).cut())
      moves.add(device,
                std::make_unique<Adam8bitMove>(StepPart<Adam8bitStep>{step, extent}, multiplier, *first, *second));
  }
}

GRADACCUM_INLINE auto kernel_of(const DeviceKernels& kernels, const Adam8bitStep&) { return kernels.adam8bit; }
GRADACCUM_INLINE Adam8bitSettings kernel_settings(const Adam8bitStep& step) {
  return {step.settings, {signed_map(), second_moment_map()}};
}
GRADACCUM_INLINE std::vector<at::Tensor> kernel_arrays(const Adam8bitStep& step) {
  return {step.exp_avg.codes, step.exp_avg_sq.codes, step.exp_avg.scales, step.exp_avg_sq.scales};
}

GRADACCUM_INLINE void add_moves(Moves& moves, const std::vector<Adam8bitStep>& steps, const Multiplier& multiplier) {
  add_moves_by_kernels(moves, steps, multiplier);
}

}  // namespace gradaccum::detail
