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

/// The steps of one launch, which share a mix of dtypes, and the offset of each step's scratch memory.
class AdafactorLaunchPlan {
 public:
  explicit AdafactorLaunchPlan(const OperandTypes& types) : types_(types) {}

  bool full() const { return places_.size() == AdafactorTable::capacity; }
  const OperandTypes& types() const { return types_; }
  std::int64_t bytes() const { return bytes_; }

  /// Adds the batch's `place`-th step.
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
            .rounding_key = step.rounding_key.value_or(0)};
  }

  OperandTypes types_;
  std::vector<std::pair<std::size_t, std::int64_t>> places_;
  std::int64_t bytes_ = 0;
};

/// A batch of steps whose launches use the same scratch memory in turn.
class AdafactorKernelMove final : public Move {
 public:
  AdafactorKernelMove(std::vector<StepPart<AdafactorStep>> batch, const Multiplier& multiplier,
                      const DeviceKernels& kernels)
      : batch_(std::move(batch)),
        operands_(Multiplier()),
        kernels_(&kernels),
        device_(batch_.front().step.parameter.device()),
        by_(multiplier.moved_to(device_)) {
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
  Multiplier by_;
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

}  // namespace gradaccum::detail
