// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Memory of one device that the parts of a step use in turn. Before `allocate()`, `tensor` only counts the bytes.
class Scratch {
 public:
  explicit Scratch(at::Device device) : device_(device) {}

  /// Returns uninitialised memory; undefined before `allocate()`.
  at::Tensor tensor(std::int64_t elements, at::ScalarType dtype) {
    constexpr std::int64_t alignment = 256;  // for operations with vector accesses
    const auto bytes = elements * static_cast<std::int64_t>(at::elementSize(dtype)), from = used_;
    used_ += (bytes + alignment - 1) / alignment * alignment;
    most_ = std::max(most_, used_);
    return memory_.defined() ? memory_.narrow(0, from, bytes).view(dtype) : at::Tensor();
  }
  /// Returns memory with the sizes and strides of `like`, which must be plain.
  at::Tensor tensor(const at::Tensor& like, at::ScalarType dtype) {
    const auto memory = tensor(like.numel(), dtype);
    return memory.defined() ? memory.as_strided(like.sizes(), like.strides()) : memory;
  }
  /// Starts the next part, which reuses the memory of the previous one.
  void begin_turn() { used_ = 0; }

  void allocate() { memory_ = at::empty({most_}, at::TensorOptions(at::kByte).device(device_)); }

 private:
  at::Device device_;
  at::Tensor memory_;
  std::int64_t used_ = 0, most_ = 0;  // bytes
};

/// A part of an optimizer's step on a device. Allocates memory only in its constructor and in `allocate`.
class DeviceStep {
 public:
  virtual ~DeviceStep() = default;
  virtual void allocate(Scratch& scratch) = 0;
  virtual void run() = 0;
};

/// The parts of an optimizer's step on devices. Allocates all memory first: running out leaves nothing half-stepped.
class StepPlan {
 public:
  void add(at::Device device, std::unique_ptr<DeviceStep> step) {
    steps_.emplace_back(&scratch_.try_emplace(device, device).first->second, std::move(step));
  }
  /// Adds a part that needs no device memory. It runs after all parts with device memory.
  void add(std::function<void()> step) { without_scratch_.push_back(std::move(step)); }

  void allocate() {
    for (auto& [scratch, step] : steps_) {
      scratch->begin_turn();
      step->allocate(*scratch);
    }
    for (auto& [device, scratch] : scratch_) scratch.allocate();
  }
  void run() {
    for (auto& [scratch, step] : steps_) {
      scratch->begin_turn();
      step->allocate(*scratch);
      step->run();
    }
    for (auto& step : without_scratch_) step();
  }

 private:
  std::vector<std::pair<Scratch*, std::unique_ptr<DeviceStep>>> steps_;
  std::vector<std::function<void()>> without_scratch_;
  std::unordered_map<at::Device, Scratch> scratch_;
};

/// A range of a tensor's real numbers in memory order, `[from, to)`; or all of them, in any order.
struct Extent {
  std::int64_t from, to;
  bool whole;

  std::int64_t size() const { return to - from; }
  at::Tensor of(const at::Tensor& tensor) const {
    if (whole || !tensor.defined()) return tensor;
    const auto real = as_real(tensor);
    return real.as_strided({size()}, {1}, real.storage_offset() + from);
  }
};

/// One parameter's step on a device, or a part of it.
template <class Step>
struct StepPart {
  Step step;
  Extent extent;
};
/// Parts of steps for one operation.
template <class Step>
using StepBatch = std::vector<StepPart<Step>>;

/// Returns the dtypes of the kernel to call.
template <class Step>
OperandTypes types_of(const Step& step) {
  return {at::toRealValueType(step.parameter.scalar_type()),
          at::toRealValueType(gradient_type(step.parameter, step.gradient)), step.rounding_key.has_value()};
}

/// Returns `found_inf` on `device`, for operations that skip a step by themselves; nothing if the device never skips
/// it.
std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier);

/// Rounds float32 numbers stochastically to adjacent bfloat16 values. `random_bits` (int32) and `is_nan` are scratch.
void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits, at::Tensor is_nan);

/// Adds steps in batches, whose bodies `body_for(batch, device)` makes. Our own kernels apply the factor themselves.
template <class Step, class BodyFor>
void add_batches(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, bool by_kernel,
                 const BodyFor& body_for);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/device_batches.ipp>
#endif
