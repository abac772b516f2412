// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_kernel_moves.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/optimizers/kernel_moves.hpp>

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE DeviceOperand operand_of(const AdafactorStep& step, bool by_kernel) {
  return {step.parameter, step.gradient, step.rounding_key, by_kernel, /*row_major=*/by_kernel};
}

GRADACCUM_INLINE AdafactorShape kernel_shape(const AdafactorStep& step) {
  const auto& p = step.parameter;
  if (step.variance.defined()) return AdafactorShape::of_vector(p.numel());
  return AdafactorShape::of_matrices(p.numel(), p.size(-2), p.size(-1));
}

/// Steps of one mix of dtypes, as many as one launch goes over, and where the memory of each begins in that of all.
class AdafactorLaunchPlan {
 public:
  explicit AdafactorLaunchPlan(const OperandTypes& types) : types_(types) {}

  bool full() const { return places_.size() == AdafactorTable::capacity; }
  const OperandTypes& types() const { return types_; }
  std::int64_t bytes() const { return bytes_; }

  /// The `place`-th of its batch.
  void add(std::size_t place, const AdafactorStep& step) {
    places_.emplace_back(place, bytes_);
    const auto size = static_cast<std::int64_t>(at::elementSize(state_type(step.parameter)));
    bytes_ += AdafactorMemory::bytes(kernel_shape(step), size);
  }

  AdafactorTable table(const std::vector<StepPart<AdafactorStep>>& batch, at::TensorList parameters,
                       at::TensorList gradients, char* memory) const {
    AdafactorTable table;
    for (auto& [place, from] : places_)
      table.add(entry(batch[place].step, parameters[place], gradients[place], memory + from));
    return table;
  }

 private:
  static AdafactorTable::Entry entry(const AdafactorStep& step, const at::Tensor& parameter, const at::Tensor& gradient,
                                     void* memory) {
    const auto data = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; };
    return {.parameter = parameter.mutable_data_ptr(),
            .gradient = gradient.const_data_ptr(),
            .row_var = data(step.variance.defined() ? step.variance : step.row_var),
            .col_var = step.variance.defined() ? nullptr : data(step.col_var),
            .exp_avg = data(step.exp_avg),
            .memory = memory,
            .shape = kernel_shape(step),
            .rounding_key = step.rounding_key.value_or(0),
            .first_block = 0,
            .first_average = 0};
  }

  OperandTypes types_;
  std::vector<std::pair<std::size_t, std::int64_t>> places_;
  std::int64_t bytes_ = 0;
};

/// A batch of steps, whose launches take turns in the same memory.
class AdafactorKernelMove final : public Move {
 public:
  AdafactorKernelMove(std::vector<StepPart<AdafactorStep>> batch, const Multiplier& multiplier,
                      const DeviceKernels& kernels)
      : batch_(std::move(batch)),
        operands_(Multiplier()),
        kernels_(&kernels),
        device_(batch_.front().step.parameter.device()),
        by_(multiplier, device_) {
    std::map<OperandTypes, std::size_t> open;
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      const auto& step = batch_[i].step;
      operands_.add(operand_of(step, /*by_kernel=*/true), batch_[i].extent);
      const auto types = types_of(step);
      const auto found = open.find(types);
      if (found == open.end() || plans_[found->second].full()) {
        open[types] = plans_.size();
        plans_.emplace_back(types);
      }
      plans_[open[types]].add(i, step);
    }
  }

  void take(Scratch& scratch) override {
    operands_.take(scratch);
    std::int64_t bytes = 0;
    for (auto& plan : plans_) bytes = std::max(bytes, plan.bytes());
    memory_ = scratch.take(bytes, at::kByte);
  }

  void run() override {
    operands_.read();
    const auto parameters = operands_.parameters(), gradients = operands_.gradients();
    {
      const c10::DeviceGuard guard(device_);
      for (auto& plan : plans_)
        kernels_->adafactor(
            {batch_.front().step.settings, by_.pointers(), plan.table(batch_, parameters, gradients, memory())},
            plan.types(), native_stream(device_));
    }
    operands_.write_back();
  }

 private:
  char* memory() const { return static_cast<char*>(memory_.mutable_data_ptr()); }

  std::vector<StepPart<AdafactorStep>> batch_;
  DeviceOperands operands_;
  const DeviceKernels* kernels_;
  at::Device device_;
  DeviceFactor by_;
  std::vector<AdafactorLaunchPlan> plans_;
  at::Tensor memory_;
};

GRADACCUM_INLINE void add_kernel_moves(Moves& moves, const std::vector<AdafactorStep>& steps,
                                       const Multiplier& multiplier, const DeviceKernels& kernels) {
  for (auto& batch : batches_of(steps, /*multiplied=*/false, /*by_kernel=*/true)) {
    const auto device = batch.front().step.parameter.device();
    moves.add(device, std::make_unique<AdafactorKernelMove>(std::move(batch), multiplier, kernels));
  }
}

/// Each way through the kernels is proved by itself.
GRADACCUM_INLINE std::string kernel_name(const AdafactorStep& step) {
  const auto shape = kernel_shape(step);
  const std::string kind = shape.is_vector() ? "vectors" : shape.is_small() ? "small matrices" : "matrices";
  const std::string variant = step.settings.pytorch ? "PyTorch's Adafactor of " : "Adafactor of ";
  return variant + kind + (step.exp_avg.defined() ? " with exp_avg" : "");
}

GRADACCUM_INLINE AdafactorSettings trial_settings(const AdafactorSettings& like) {
  return {.lr = 0.1,
          .step_size = 0.1,
          .fresh2 = 0.3,
          .eps1 = like.pytorch ? 1e-3 : 1e-6,
          .eps2 = 1e-3,
          .d = 0.8,
          .weight_decay = 0.1,
          .beta1 = 0.9,
          .scale_parameter = true,
          .pytorch = like.pytorch,
          .step = trial_step,
          .beta2_decay = -0.8,
          .relative_step = true};
}

/// Among them a vector of more than one block of threads; many small matrices; a large one of several tiles beside and
/// below one another, and several of many short rows.
GRADACCUM_INLINE std::vector<std::int64_t> trial_sizes(const AdafactorShape& like, std::int64_t size) {
  if (like.is_vector()) return {2 * size};
  if (like.is_small()) return {size / 5 + 1, 3, 3};
  if (size < 10) return {2, 270};
  return size < 1000 ? std::vector<std::int64_t>{3, 600, 20} : std::vector<std::int64_t>{67, 270};
}

GRADACCUM_INLINE AdafactorStep trial_of(const AdafactorStep& like, const TrialNumbers& numbers) {
  const auto [parameter, gradient, rounded] = types_of(like);
  const auto state = state_type(like.parameter);
  const auto shape = kernel_shape(like);
  const auto sizes = trial_sizes(shape, numbers.size());
  auto row_sizes = sizes, column_sizes = sizes;
  if (!shape.is_vector()) row_sizes.back() = column_sizes[sizes.size() - 2] = 1;
  const auto positive = [&](bool is_there, at::IntArrayRef as) {
    return is_there ? numbers.positive(state, as) : at::Tensor();
  };
  return {trial_settings(like.settings),
          numbers.of(parameter, sizes),
          numbers.of(gradient, sizes),
          positive(!shape.is_vector(), row_sizes),
          positive(!shape.is_vector(), column_sizes),
          positive(shape.is_vector(), sizes),
          like.exp_avg.defined() ? numbers.of(state, sizes) : at::Tensor(),
          like.rounding_key};
}

GRADACCUM_INLINE std::vector<TrialResult> results_of(const AdafactorStep& step) {
  std::vector<TrialResult> results;
  for (auto& tensor : {step.parameter, step.row_var, step.col_var, step.variance, step.exp_avg})
    if (tensor.defined()) results.push_back(trial_result(tensor));
  return results;
}

}  // namespace gradaccum::detail
