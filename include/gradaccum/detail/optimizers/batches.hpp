// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/device_operands.hpp>
#include <gradaccum/detail/optimizers/moves.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// One parameter's step on a device, or a part of it.
template <class Step>
struct StepPart {
  Step step;
  Extent extent;
};

template <class Step>
DeviceOperand operand_of(const Step& step, bool by_kernel = false) {
  return {step.parameter, step.gradient, step.rounding_key, by_kernel};
}

/// Splits steps into batches for one operation each: of one device, equal settings and, except for our own kernels, one
/// dtype (16-bit ones are computed in float32). Limits the memory for copies, for which large steps are split.
template <class Step>
std::vector<std::vector<StepPart<Step>>> batches_of(const std::vector<Step>& steps, bool multiplied,
                                                    bool by_kernel = false) {
  std::vector<std::vector<StepPart<Step>>> batches;
  std::int64_t copied = 0;
  const auto fits = [&](const Step& step, std::int64_t more) {
    if (batches.empty() || copied + more > most_copied) return false;
    const auto& first = batches.back().front().step;
    return step.settings == first.settings && step.parameter.device() == first.parameter.device() &&
           (by_kernel || step.parameter.scalar_type() == first.parameter.scalar_type());
  };
  const auto add = [&](const Step& step, const Extent& extent, std::int64_t more) {
    if (!fits(step, more)) {
      batches.emplace_back();
      copied = 0;
    }
    batches.back().push_back({step, extent});
    copied += more;
  };
  for (auto& step : steps)
    if (const auto operand = operand_of(step, by_kernel); operand.copied(multiplied))
      for (auto& extent : operand.cut()) add(step, extent, extent.size());
    else
      add(step, operand.whole(), 0);
  return batches;
}

/// A batch's step, which `body(batch, parameters, gradients)` runs.
template <class Step, class Body>
class BatchMove final : public Move {
 public:
  BatchMove(std::vector<StepPart<Step>> batch, const Multiplier& multiplier, Body body, bool by_kernel = false)
      : batch_(std::move(batch)), operands_(multiplier), body_(std::move(body)) {
    for (auto& part : batch_) operands_.add(operand_of(part.step, by_kernel), part.extent);
  }
  void take(Scratch& scratch) override { operands_.take(scratch); }
  void run() override {
    operands_.read();
    body_(batch_, operands_.parameters(), operands_.gradients());
    operands_.write_back();
  }

 private:
  std::vector<StepPart<Step>> batch_;
  DeviceOperands operands_;
  Body body_;
};

/// Adds steps in batches. `body_for(settings, device)` makes a body, and all it needs, before any parameter changes.
template <class Step, class BodyFor>
void add_batches(Moves& moves, const std::vector<Step>& steps, const Multiplier& multiplier, const BodyFor& body_for) {
  for (auto& batch : batches_of(steps, !multiplier.is_one())) {
    const auto& first = batch.front().step;
    const auto device = first.parameter.device();
    auto body = body_for(first.settings, device);
    moves.add(device, std::make_unique<BatchMove<Step, decltype(body)>>(std::move(batch), multiplier, std::move(body)));
  }
}

}  // namespace gradaccum::detail
