// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/step_plan.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/Context.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include <gradaccum/impl/begin.ipp>

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

GRADACCUM_INLINE Scratch* StepPlan::scratch_of(at::Device device) {
  const auto is_its = [&](const auto& scratch) { return scratch->device() == device; };
  const auto found = std::find_if(scratches_.begin(), scratches_.end(), is_its);
  if (found != scratches_.end()) return found->get();
  return scratches_.emplace_back(std::make_unique<Scratch>(device)).get();
}

GRADACCUM_INLINE void StepPlan::prepare() {
  for (auto& [scratch, move] : moves_) {
    scratch->begin_turn();
    move->take(*scratch);
  }
  for (auto& scratch : scratches_) scratch->allocate();
}

GRADACCUM_INLINE void StepPlan::run() {
  for (auto& [scratch, move] : moves_) {
    scratch->begin_turn();
    move->take(*scratch);
    move->run();
  }
  for (auto& move : without_scratch_) move();
}

GRADACCUM_INLINE at::Tensor Extent::of(const at::Tensor& tensor) const {
  if (whole || !tensor.defined()) return tensor;
  const auto real = as_real(tensor);
  return real.as_strided({size()}, {1}, real.storage_offset() + from);
}

GRADACCUM_INLINE bool DeviceOperand::copies_parameter() const {
  return !is_plain(parameter) || parameter.scalar_type() != dtype_of_parameter() ||
         (row_major && !parameter.is_contiguous());
}

GRADACCUM_INLINE at::ScalarType DeviceOperand::dtype_of_parameter() const {
  return by_kernel ? parameter.scalar_type() : state_type(parameter);
}

GRADACCUM_INLINE bool DeviceOperand::copies_gradient(bool multiplied) const {
  return (multiplied && !by_kernel) || gradient.scalar_type() != dtype_of_gradient() || !is_plain(gradient) ||
         !(row_major ? gradient.is_contiguous() : same_order(parameter, gradient));
}

GRADACCUM_INLINE at::ScalarType DeviceOperand::dtype_of_gradient() const {
  return by_kernel && gradient.scalar_type() == parameter.scalar_type() ? parameter.scalar_type()
                                                                        : state_type(parameter);
}

GRADACCUM_INLINE Extent DeviceOperand::whole() const {
  return {0, parameter.is_complex() ? 2 * parameter.numel() : parameter.numel(), /*whole=*/true};
}

GRADACCUM_INLINE at::Tensor DeviceOperand::layout() const {
  if (!row_major || parameter.is_contiguous()) return plain_layout_of(parameter);
  return at::empty(parameter.sizes(), parameter.options().device(at::kMeta));
}

GRADACCUM_INLINE std::vector<Extent> DeviceOperand::cut() const {
  const auto all = whole();
  const bool lie_alike = is_plain(parameter) && is_plain(gradient) && same_order(parameter, gradient);
  if (all.size() <= most_copied || !lie_alike || row_major) return {all};
  std::vector<Extent> extents;
  for (std::int64_t from = 0; from < all.to; from += most_copied)
    extents.push_back({from, std::min(from + most_copied, all.to), /*whole=*/false});
  return extents;
}

GRADACCUM_INLINE std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier) {
  if (!multiplier.found_inf.defined()) return {};
  return multiplier.found_inf.to(device, /*non_blocking=*/true);
}

GRADACCUM_INLINE at::Tensor left_out_on(at::Device device, const Multiplier& multiplier) {
  const auto found_inf = found_inf_on(device, multiplier);
  return found_inf ? found_inf->to(at::kBool) : at::Tensor();
}

GRADACCUM_INLINE void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits,
                                            at::Tensor is_nan) {
  auto generator = at::globalContext().defaultGenerator(numbers.device()).clone();
  generator.set_current_seed(key);
  at::ne_out(is_nan, numbers, numbers);
  random_bits.random_(0, 1 << 16, generator).add_(numbers.view(at::kInt)).bitwise_and_(-(1 << 16));
  auto result = numbers;
  at::where_out(result, is_nan, numbers, random_bits.view(at::kFloat));
}

GRADACCUM_INLINE void DeviceOperands::add(const DeviceOperand& operand, const Extent& extent) {
  Part part{
      .of = operand, .layout = {}, .parameter = extent.of(operand.parameter), .gradient = extent.of(operand.gradient)};
  // Rounds each part of a parameter with different random numbers.
  if (part.of.rounding_key) *part.of.rounding_key += static_cast<std::uint64_t>(extent.from);
  part.layout = extent.whole ? operand.layout() : plain_layout_of(part.parameter);
  if (!by_.on_host() && !factor_.defined()) {
    wide_factor_ = by_.on(part.parameter.device());
    factor_ = wide_factor_.to(at::toRealValueType(state_type(part.parameter)));
  }
  parts_.push_back(std::move(part));
}

GRADACCUM_INLINE void DeviceOperands::take(Scratch& scratch) {
  for (auto& part : parts_) {
    const auto take = [&](at::ScalarType dtype) {  // a part of a complex tensor has real numbers
      return scratch.take(part.layout, part.parameter.is_complex() ? dtype : at::toRealValueType(dtype));
    };
    if (part.of.copies_parameter()) part.parameter_copy = take(part.of.dtype_of_parameter());
    if (part.of.copies_gradient(!by_.is_one())) part.gradient_copy = take(part.of.dtype_of_gradient());
    if (!part.of.rounding_key || part.of.by_kernel) continue;
    part.random_bits = scratch.take(part.layout, at::kInt);
    part.is_nan = scratch.take(part.layout, at::kBool);
  }
}

GRADACCUM_INLINE void DeviceOperands::read() {
  std::vector<at::Tensor> parameter_copies, parameters, gradient_copies, gradients, lazy;
  for (auto& part : parts_) {
    if (part.parameter_copy.defined()) {
      parameter_copies.push_back(part.parameter_copy);
      parameters.push_back(part.parameter);
    }
    if (!part.gradient_copy.defined()) continue;
    const bool wide = part.gradient.element_size() > part.gradient_copy.element_size();
    if (wide && !by_.is_one()) {  // may exceed the copy's dtype before it is multiplied
      at::mul_out(part.gradient_copy, part.gradient,
                  by_.on_host() ? at::scalar_tensor(by_.host(), at::kDouble) : wide_factor_);
    } else if (part.gradient.is_conj() || part.gradient.is_neg() || part.gradient._is_zerotensor()) {
      lazy.push_back(part.gradient_copy.copy_(part.gradient));  // foreach operations would copy these
    } else {
      gradient_copies.push_back(part.gradient_copy);
      gradients.push_back(part.gradient);
    }
  }
  if (!parameters.empty()) at::_foreach_copy_(parameter_copies, parameters);
  if (!gradients.empty()) at::_foreach_copy_(gradient_copies, gradients);
  gradient_copies.insert(gradient_copies.end(), lazy.begin(), lazy.end());
  if (by_.is_one() || gradient_copies.empty()) return;
  for (auto& copy : gradient_copies) copy = as_real(copy);
  by_.on_host() ? at::_foreach_mul_(gradient_copies, by_.host()) : at::_foreach_mul_(gradient_copies, factor_);
}

GRADACCUM_INLINE std::vector<at::Tensor> DeviceOperands::parameters() const {
  std::vector<at::Tensor> all;
  for (auto& part : parts_) all.push_back(as_real(part.stepped()));
  return all;
}

GRADACCUM_INLINE std::vector<at::Tensor> DeviceOperands::gradients() const {
  std::vector<at::Tensor> all;
  for (auto& part : parts_) all.push_back(as_real(part.gradient_copy.defined() ? part.gradient_copy : part.gradient));
  return all;
}

GRADACCUM_INLINE void DeviceOperands::write_back() const {
  for (auto& part : parts_) {
    if (part.of.rounding_key && !part.of.by_kernel)
      round_stochastically_(part.parameter_copy, *part.of.rounding_key, part.random_bits, part.is_nan);
    detail::write_back(part.parameter, part.stepped());
  }
}

/// Excludes gradients wider than the state: a float64 sum may exceed float32 before it is multiplied.
GRADACCUM_INLINE bool fits_kernel(const at::Tensor& parameter, const at::Tensor& gradient) {
  return has_kernels(at::toRealValueType(parameter.scalar_type())) && parameter.scalar_type() != at::kComplexHalf &&
         parameter.is_cuda() && at::elementSize(gradient.scalar_type()) <= at::elementSize(state_type(parameter));
}

GRADACCUM_INLINE OperandTypes kernel_types(const at::Tensor& parameter, const at::Tensor& gradient, bool rounded) {
  const auto dtype = parameter.scalar_type();
  const bool same = gradient.scalar_type() == dtype;
  return {at::toRealValueType(dtype), at::toRealValueType(same ? dtype : state_type(parameter)), rounded};
}

/// Excludes a weight decay that is added to the gradient, since it gives all rows moments.
GRADACCUM_INLINE bool steps_by_rows(const AdamSettings& by, const at::Tensor& parameter, const at::Tensor& gradient,
                                    const Multiplier& multiplier) {
  return (by.decoupled || by.weight_decay == 0) && steps_by_rows(parameter, gradient, multiplier);
}

GRADACCUM_INLINE AdamStep adam_step_of(const AdamSettings& settings, const at::Tensor& parameter,
                                       const at::Tensor& gradient, const at::Tensor& exp_avg,
                                       const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq,
                                       const Multiplier& multiplier) {
  AdamStep step{settings, parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq};
  std::vector<FloatMoments> moments{{step.exp_avg, "exp_avg"}, {step.exp_avg_sq, "exp_avg_sq"}};
  if (settings.amsgrad)
    moments.push_back({step.max_exp_avg_sq, "max_exp_avg_sq"});
  else
    step.max_exp_avg_sq = dense_of(max_exp_avg_sq);
  step.rows =
      prepare_moments(parameter, step.gradient, moments, steps_by_rows(settings, parameter, gradient, multiplier));
  return step;
}

/// Decoupled weight decay changes all rows. An eps that is 0 or denormal in float32 turns them into NaN.
GRADACCUM_INLINE bool moves_all_rows(const AdamSettings& by) {
  return (by.decoupled && by.lr * by.weight_decay != 0) || by.eps < std::numeric_limits<float>::min();
}

GRADACCUM_INLINE void step_rows_on_cpu(const AdamStep& s, const AdamOperand& operand) {
  const auto bytes = static_cast<std::int64_t>(s.exp_avg.element_size()) * s.exp_avg.size(1);
  take_rows(*s.rows, operand, adam_kernel, s.parameter, s.rounding_key, moves_all_rows(s.settings),
            [&](AdamOperand& of_row, const StepRows::Row& row) {
              for (auto* const moments : {&of_row.exp_avg, &of_row.exp_avg_sq, &of_row.max_exp_avg_sq})
                if (*moments) *moments = first_of_table(*moments, row.moments, row.number, bytes);
            });
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<AdamStep>& steps, double multiplier) {
  KernelLoop<AdamOperand> loop(steps.size());
  AdamNumbers numbers{};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto& s = steps[i];
    if (i == 0 || !(s.settings == steps[i - 1].settings)) numbers = numbers_of(s.settings, multiplier);
    AdamOperand operand{.numbers = numbers,
                        .exp_avg = s.exp_avg.mutable_data_ptr(),
                        .exp_avg_sq = s.exp_avg_sq.mutable_data_ptr(),
                        .max_exp_avg_sq = s.settings.amsgrad ? s.max_exp_avg_sq.mutable_data_ptr() : nullptr};
    if (s.rows)
      step_rows_on_cpu(s, operand);
    else
      loop.add(operand, adam_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

// The fused operation reads the step count from the device, but does not advance it.
GRADACCUM_INLINE FusedAdam::FusedAdam(const AdamSettings& by, const Multiplier& multiplier, at::Device device)
    : by_(by),
      count_(at::full({}, static_cast<double>(by.step), at::TensorOptions(at::kFloat).device(device))),
      found_inf_(found_inf_on(device, multiplier)) {
  // Stays at least 1, even if the state was replaced since the host last read the number of skipped steps.
  if (multiplier.skipped_steps.defined())
    count_.sub_(multiplier.skipped_steps.to(device, /*non_blocking=*/true)).clamp_min_(1);
}

GRADACCUM_INLINE void FusedAdam::operator()(at::TensorList parameters, at::TensorList gradients,
                                            at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                                            at::TensorList max_exp_avg_sqs) const {
  const std::vector<at::Tensor> counts(parameters.size(), count_);
  const auto step = [&](auto fused) {
    fused(parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, counts, by_.lr, by_.beta1, by_.beta2,
          by_.weight_decay, by_.eps, by_.amsgrad, /*maximize=*/false, std::nullopt, found_inf_);
  };
  using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                     double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                     const std::optional<at::Tensor>&);
  step(by_.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_));
}

GRADACCUM_INLINE void plan_aten_steps(StepPlan& moves, const std::vector<AdamStep>& steps,
                                      const Multiplier& multiplier) {
  add_batches(moves, steps, multiplier, [&](const AdamSettings& by, at::Device device) {
    return [fused = FusedAdam(by, multiplier, device), amsgrad = by.amsgrad](
               const std::vector<StepPart<AdamStep>>& batch, at::TensorList p, at::TensorList g) {
      std::vector<at::Tensor> m, v, x;
      for (auto& [step, extent] : batch) {
        m.push_back(as_real(extent.of(step.exp_avg)));
        v.push_back(as_real(extent.of(step.exp_avg_sq)));
        if (amsgrad) x.push_back(as_real(extent.of(step.max_exp_avg_sq)));
      }
      fused(p, g, m, v, x);
    };
  });
}

GRADACCUM_INLINE auto kernel_of(const DeviceKernels& kernels, const AdamStep&) { return kernels.adam; }
GRADACCUM_INLINE AdamSettings kernel_settings(const AdamStep& step) { return step.settings; }
GRADACCUM_INLINE std::vector<at::Tensor> kernel_arrays(const AdamStep& step) {
  return {step.exp_avg, step.exp_avg_sq, step.settings.amsgrad ? step.max_exp_avg_sq : at::Tensor()};
}

GRADACCUM_INLINE void plan_steps(StepPlan& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier) {
  add_moves_by_kernels(moves, steps, multiplier);
}

GRADACCUM_INLINE void step_rows_on_cpu(const SgdStep& s, const SgdOperand& operand) {
  const auto bytes = operand.momentum_buffer ? s.momentum_buffer.size(1) * s.momentum_buffer.element_size() : 0;
  take_rows(*s.rows, operand, sgd_kernel, s.parameter, s.rounding_key, /*all=*/false,
            [&](SgdOperand& of_row, const StepRows::Row& row) {
              if (bytes > 0)
                of_row.momentum_buffer = first_of_table(of_row.momentum_buffer, row.moments, row.number, bytes);
            });
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<SgdStep>& steps, double multiplier) {
  KernelLoop<SgdOperand> loop(steps.size());
  for (auto& s : steps) {
    const auto& by = s.settings;
    SgdOperand operand{.numbers = numbers_of(by, multiplier),
                       .momentum_buffer = by.momentum != 0 ? s.momentum_buffer.mutable_data_ptr() : nullptr};
    if (s.rows)
      step_rows_on_cpu(s, operand);
    else
      loop.add(operand, sgd_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

GRADACCUM_INLINE void plan_aten_steps(StepPlan& moves, const std::vector<SgdStep>& steps,
                                      const Multiplier& multiplier) {
  add_batches(moves, steps, multiplier, [&](const SgdSettings& by, at::Device device) {
    return [by, found_inf = found_inf_on(device, multiplier)](const std::vector<StepPart<SgdStep>>& batch,
                                                              at::TensorList p, at::TensorList g) {
      std::vector<at::Tensor> buffers;
      for (auto& [step, extent] : batch)
        if (by.momentum != 0) buffers.push_back(as_real(extent.of(step.momentum_buffer)));
      at::_fused_sgd_(p, g, buffers, by.weight_decay, by.momentum, by.lr, by.dampening, by.nesterov,
                      /*maximize=*/false, by.first, std::nullopt, found_inf);
    };
  });
}

GRADACCUM_INLINE auto kernel_of(const DeviceKernels& kernels, const SgdStep&) { return kernels.sgd; }
GRADACCUM_INLINE SgdSettings kernel_settings(const SgdStep& step) { return step.settings; }
GRADACCUM_INLINE std::vector<at::Tensor> kernel_arrays(const SgdStep& step) {
  return {step.settings.momentum != 0 ? step.momentum_buffer : at::Tensor()};
}

GRADACCUM_INLINE void plan_steps(StepPlan& moves, const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  add_moves_by_kernels(moves, steps, multiplier);
}

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

GRADACCUM_INLINE Codes checked_state(const Codes& moments, const at::Tensor& parameter, bool is_signed,
                                     const char* name) {
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
  const auto prepare = [&](const Codes& moments, bool is_signed, const char* name) {
    if (by_rows && (!moments.codes.defined() || moments.codes.is_sparse())) return moments;
    return checked_state(dense_of(moments, is_signed), parameter, is_signed, name);
  };
  Adam8bitStep step{settings, parameter, gradient, prepare(exp_avg, true, "exp_avg"),
                    prepare(exp_avg_sq, false, "exp_avg_sq")};
  if (!by_rows && gradient.is_sparse()) step.gradient = gradient.to_dense();
  if (!by_rows) return step;
  auto all = moments_of(step.exp_avg, parameter, true);
  for (auto& moments : moments_of(step.exp_avg_sq, parameter, false)) all.push_back(moments);
  step.rows = rows_of(parameter, gradient, all);
  step.exp_avg = {all[0].tensor, all[1].tensor};
  step.exp_avg_sq = {all[2].tensor, all[3].tensor};
  return step;
}

GRADACCUM_INLINE void step_rows_on_cpu(const Adam8bitStep& s, const Adam8bitOperand& operand) {
  const auto width = s.exp_avg.codes.size(1), bytes_of_scales = width / eight_bit_block * 4;
  take_rows(*s.rows, operand, adam8bit_kernel, s.parameter, s.rounding_key, moves_all_rows(s.settings),
            [&](Adam8bitOperand& of_row, const StepRows::Row& row) {
              for (auto* const codes : {&of_row.exp_avg, &of_row.exp_avg_sq})
                *codes = first_of_table(*codes, row.moments, row.number, width);
              for (auto* const scales : {&of_row.exp_avg_scale, &of_row.exp_avg_sq_scale})
                *scales = first_of_table(*scales, row.moments, row.number, bytes_of_scales);
            });
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<Adam8bitStep>& steps, double multiplier) {
  KernelLoop<Adam8bitOperand> loop(steps.size(), eight_bit_block);
  for (auto& s : steps) {
    Adam8bitOperand operand{.numbers = numbers_of(s.settings, multiplier),
                            .exp_avg = s.exp_avg.codes.mutable_data_ptr<std::uint8_t>(),
                            .exp_avg_sq = s.exp_avg_sq.codes.mutable_data_ptr<std::uint8_t>(),
                            .exp_avg_scale = s.exp_avg.scales.mutable_data_ptr<float>(),
                            .exp_avg_sq_scale = s.exp_avg_sq.scales.mutable_data_ptr<float>()};
    if (s.rows)
      step_rows_on_cpu(s, operand);
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
        skipped_steps_(left_out_on(part.step.parameter.device(), multiplier)),
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
    if (!skipped_steps_.defined()) return;
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
    if (!skipped_steps_.defined()) return coding.encode(numbers, codes, places_, usable_);
    coding.encode(numbers, fresh_, places_, usable_);
    at::where_out(codes.codes, skipped_steps_, codes.codes, fresh_.codes);
    at::where_out(codes.scales, skipped_steps_, codes.scales, fresh_.scales);
  }

  DeviceOperands operands_;
  FusedAdam fused_;
  at::Tensor skipped_steps_;
  Coding first_, second_;
  Codes exp_avg_, exp_avg_sq_, fresh_;
  at::Tensor places_, m_, v_, usable_;
};

GRADACCUM_INLINE void plan_aten_steps(StepPlan& moves, const std::vector<Adam8bitStep>& steps,
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

GRADACCUM_INLINE void plan_steps(StepPlan& moves, const std::vector<Adam8bitStep>& steps,
                                 const Multiplier& multiplier) {
  add_moves_by_kernels(moves, steps, multiplier);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
