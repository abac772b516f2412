// SPDX-License-Identifier: Apache-2.0
// Makes batches of parameters on a device, with copies in the form that an operation or a kernel reads.
#pragma once

#include <gradaccum/detail/optimizers/device_batches.hpp>

#include <gradaccum/detail/optimizers/steps.hpp>

#include <ATen/Context.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <type_traits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// A parameter and its gradient, to be stepped by ATen's operations or by our own kernel.
struct DeviceOperand {
  at::Tensor parameter, gradient;
  std::optional<std::uint64_t> rounding_key;
  bool by_kernel = false;  ///< our own kernel, which accepts dtypes and a factor as they are, and rounds
  bool row_major = false;  ///< for kernels that use rows and columns

  /// True if a copy is needed: for a factor (`multiplied`), the dtype, or the order of the elements.
  bool copies_parameter() const {
    return !is_plain(parameter) || parameter.scalar_type() != dtype_of_parameter() ||
           (row_major && !parameter.is_contiguous());
  }
  bool copies_gradient(bool multiplied) const {
    return (multiplied && !by_kernel) || gradient.scalar_type() != dtype_of_gradient() || !is_plain(gradient) ||
           !(row_major ? gradient.is_contiguous() : same_order(parameter, gradient));
  }
  at::ScalarType dtype_of_parameter() const { return by_kernel ? parameter.scalar_type() : state_type(parameter); }
  at::ScalarType dtype_of_gradient() const {
    return by_kernel ? gradient_type(parameter, gradient) : state_type(parameter);
  }
  /// A tensor with the sizes and strides of copies.
  at::Tensor layout() const {
    if (!row_major || parameter.is_contiguous()) return plain_layout_of(parameter);
    return at::empty(parameter.sizes(), parameter.options().device(at::kMeta));
  }
  Extent whole() const {
    return {0, parameter.is_complex() ? 2 * parameter.numel() : parameter.numel(), /*whole=*/true};
  }
  /// Splits the elements into parts of at most `most_copied`, if their order allows it.
  std::vector<Extent> cut() const {
    const auto all = whole();
    const bool lie_alike = is_plain(parameter) && is_plain(gradient) && same_order(parameter, gradient);
    if (all.size() <= most_copied || !lie_alike || row_major) return {all};
    std::vector<Extent> extents;
    for (std::int64_t from = 0; from < all.to; from += most_copied)
      extents.push_back({from, std::min(from + most_copied, all.to), /*whole=*/false});
    return extents;
  }
};

GRADACCUM_INLINE std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier) {
  if (!multiplier.found_inf.defined()) return {};
  return multiplier.found_inf.to(device, /*non_blocking=*/true);
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

/// The parameters and gradients of one part of a step in the memory that is used in the computation, which is their own
/// or copies. All are on one device and, except for our own kernels, computed in one dtype.
class DeviceOperands {
 public:
  explicit DeviceOperands(Multiplier by) : by_(std::move(by)) {}
  void add(DeviceOperand operand, const Extent& extent) {
    operand.parameter = extent.of(operand.parameter);
    operand.gradient = extent.of(operand.gradient);
    // Rounds each part of a parameter with different random numbers.
    if (operand.rounding_key) *operand.rounding_key += static_cast<std::uint64_t>(extent.from);
    if (!by_.on_host() && !factor_.defined()) {
      wide_factor_ = by_.on(operand.parameter.device());
      factor_ = wide_factor_.to(at::toRealValueType(state_type(operand.parameter)));
    }
    parts_.push_back({operand, operand.layout()});
  }

  void allocate(Scratch& scratch) {
    for (auto& part : parts_) {
      if (part.copies_parameter()) part.parameter_copy = scratch.tensor(part.layout, part.dtype_of_parameter());
      if (part.copies_gradient(!by_.is_one()))
        part.gradient_copy = scratch.tensor(part.layout, part.dtype_of_gradient());
      if (!part.rounding_key || part.by_kernel) continue;
      part.random_bits = scratch.tensor(part.layout, at::kInt);
      part.is_nan = scratch.tensor(part.layout, at::kBool);
    }
  }

  /// Fills the copies, and multiplies the gradients by the factor.
  void read() {
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

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (auto& part : parts_) all.push_back(as_real(part.stepped()));
    return all;
  }

  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (auto& part : parts_) all.push_back(as_real(part.gradient_copy.defined() ? part.gradient_copy : part.gradient));
    return all;
  }

  /// Ends the step: rounds copies stochastically if requested, and writes the parameters back.
  void write_back() const {
    for (auto& part : parts_) {
      if (part.rounding_key && !part.by_kernel)
        round_stochastically_(part.parameter_copy, *part.rounding_key, part.random_bits, part.is_nan);
      detail::write_back(part.parameter, part.stepped());
    }
  }

 private:
  struct Part : DeviceOperand {
    at::Tensor layout;  // has the sizes and strides of copies
    at::Tensor parameter_copy = {}, gradient_copy = {}, random_bits = {}, is_nan = {};

    const at::Tensor& stepped() const { return parameter_copy.defined() ? parameter_copy : parameter; }
  };

  std::vector<Part> parts_;
  Multiplier by_;
  at::Tensor factor_, wide_factor_;  // known only on the device: in the computation's dtype, and in float64
};

/// Adafactor's kernels use rows and columns.
template <class Step>
DeviceOperand operand_of(const Step& step, bool by_kernel) {
  return {step.parameter, step.gradient, step.rounding_key, by_kernel,
          /*row_major=*/by_kernel && std::is_same_v<Step, AdafactorStep>};
}

/// Splits steps into batches for one operation each: of one device, equal settings and, except for our own kernels, one
/// dtype (16-bit ones are computed in float32). Limits the memory for copies, for which large steps are split.
template <class Step>
std::vector<StepBatch<Step>> batches_of(const std::vector<Step>& steps, bool multiplied, bool by_kernel) {
  std::vector<StepBatch<Step>> batches;
  std::int64_t copied = 0;
  const auto add = [&](const Step& step, const Extent& extent, std::int64_t more) {
    const auto* const first = batches.empty() ? nullptr : &batches.back().front().step;
    if (!first || copied + more > most_copied || !(step.settings == first->settings) ||
        step.parameter.device() != first->parameter.device() ||
        (!by_kernel && step.parameter.scalar_type() != first->parameter.scalar_type())) {
      batches.emplace_back();
      copied = 0;
    }
    batches.back().push_back({step, extent});
    copied += more;
  };
  for (auto& step : steps)
    if (const auto operand = operand_of(step, by_kernel);
        operand.copies_parameter() || operand.copies_gradient(multiplied))
      for (auto& extent : operand.cut()) add(step, extent, extent.size());
    else
      add(step, operand.whole(), 0);
  return batches;
}

/// A batch's step, which `body(batch, parameters, gradients)` runs, with scratch memory if it has an `allocate`.
template <class Step, class Body>
class BatchStep final : public DeviceStep {
 public:
  BatchStep(StepBatch<Step> batch, const Multiplier& multiplier, Body body, bool by_kernel)
      : batch_(std::move(batch)), operands_(multiplier), body_(std::move(body)) {
    for (auto& part : batch_) operands_.add(operand_of(part.step, by_kernel), part.extent);
  }
  void allocate(Scratch& scratch) override {
    operands_.allocate(scratch);
    if constexpr (requires { body_.allocate(scratch); }) body_.allocate(scratch);
  }
  void run() override {
    operands_.read();
    body_(batch_, operands_.parameters(), operands_.gradients());
    operands_.write_back();
  }

 private:
  StepBatch<Step> batch_;
  DeviceOperands operands_;
  Body body_;
};

template <class Step, class BodyFor>
void add_batches(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, bool by_kernel,
                 const BodyFor& body_for) {
  for (auto& batch : batches_of(steps, !by_kernel && !multiplier.is_one(), by_kernel)) {
    const auto device = batch.front().step.parameter.device();
    auto body = body_for(batch, device);
    plan.add(device, std::make_unique<BatchStep<Step, decltype(body)>>(
                         std::move(batch), by_kernel ? Multiplier() : multiplier, std::move(body), by_kernel));
  }
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
