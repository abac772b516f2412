// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

/// The steps of this library's optimizers. A step has the tensors that it reads and writes, and runs
///
/// - on the CPU by `step_on_cpu`: SIMD kernels in one parallel loop; a sparse gradient steps only its own rows;
/// - on a device by `plan_steps`, which adds to a `StepPlan`, per parameter, the library's kernels (`add_kernel_steps`)
///   or, for Adam and SGD only, ATen's operations (`plan_aten_steps`).
namespace gradaccum::detail {

/// The rows of a table that one step by a sparse gradient reads: steps.ipp.
class StepRows;

/// One parameter's step of Adam or AdamW.
struct AdamStep {
  AdamSettings settings;
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the moments; nullptr: all

  using Operand = AdamOperand;
  static auto kernel(const DeviceKernels& kernels) { return kernels.adam; }
  static constexpr auto cpu_kernel = &Kernels::adam;
  const AdamSettings& kernel_settings() const { return settings; }
  /// Returns the tensors of the state in the order of a device's operand; `state_of` returns their pointers in a CPU's.
  std::array<const at::Tensor*, 3> state() const {
    return {&exp_avg, &exp_avg_sq, settings.amsgrad ? &max_exp_avg_sq : nullptr};
  }
  static auto state_of(AdamOperand& o) { return std::tie(o.exp_avg, o.exp_avg_sq, o.max_exp_avg_sq); }
};

/// One parameter's step of SGD.
struct SgdStep {
  SgdSettings settings;
  at::Tensor parameter, gradient, momentum_buffer;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the momentum; nullptr: all

  using Operand = SgdOperand;
  static auto kernel(const DeviceKernels& kernels) { return kernels.sgd; }
  static constexpr auto cpu_kernel = &Kernels::sgd;
  const SgdSettings& kernel_settings() const { return settings; }
  std::array<const at::Tensor*, 1> state() const { return {settings.momentum != 0 ? &momentum_buffer : nullptr}; }
  static auto state_of(SgdOperand& o) { return std::tie(o.momentum_buffer); }
};

/// A tensor of 8-bit moments: a code for each element, in the parameter's memory order, and the largest magnitude of
/// each block of `eight_bit_block` elements.
struct Codes {
  at::Tensor codes, scales;
};

/// One parameter's step with 8-bit moments.
struct Adam8bitStep {
  AdamSettings settings;
  at::Tensor parameter, gradient;
  Codes exp_avg, exp_avg_sq;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the moments; nullptr: all

  using Operand = Adam8bitOperand;
  static auto kernel(const DeviceKernels& kernels) { return kernels.adam8bit; }
  static constexpr auto cpu_kernel = &Kernels::adam8bit;
  Adam8bitSettings kernel_settings() const { return {settings, {signed_map(), second_moment_map()}}; }
  std::array<const at::Tensor*, 4> state() const {
    return {&exp_avg.codes, &exp_avg_sq.codes, &exp_avg.scales, &exp_avg_sq.scales};
  }
  static auto state_of(Adam8bitOperand& o) {
    return std::tie(o.exp_avg, o.exp_avg_sq, o.exp_avg_scale, o.exp_avg_sq_scale);
  }
};

/// One parameter's step of Adafactor. The state is row-major.
struct AdafactorStep {
  AdafactorSettings settings;
  at::Tensor parameter, gradient, row_var, col_var, variance, exp_avg;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
};

/// Returns the codes' values in float32. Works on any device.
at::Tensor decoded(const Codes& moments, bool is_signed);

/// Returns the nearest codes of a plain float32 tensor, in a tie the smaller one (in kernels: the one nearer to 0).
/// Works on any device.
Codes encoded(const at::Tensor& numbers, bool is_signed);

/// Returns the moments in the parameter's element order; zeros if there are none. Throws if loaded moments do not fit.
Codes checked_state(const Codes& moments, const at::Tensor& parameter, bool is_signed, const char* name);

/// Prepares a step that has the current state, whose tensors may be undefined. A sparse gradient steps only its rows if
/// possible; with 8-bit moments, only if rows are whole blocks.
AdamStep prepared(AdamStep step, const Multiplier& multiplier);
SgdStep prepared(SgdStep step, const Multiplier& multiplier);
Adam8bitStep prepared(Adam8bitStep step, const Multiplier& multiplier);

/// Returns a step's moments in the form of the parameter's state.
template <class Step>
at::Tensor state_tensor(const Step& step, const at::Tensor& moments);

/// Runs the steps of parameters on the CPU in one parallel loop that reads and writes each element once (Adafactor a
/// few times), or in several loops if many parameters must be copied first. Leaves out steps on devices.
template <class Step>
void step_on_cpu(const std::vector<Step>& steps, double multiplier);
void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);

/// Returns the factor as a number on the host. Synchronizes if a device knows a part of it.
double host_number(const Multiplier& multiplier);

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

/// Returns a bool tensor that is true if the step is skipped; undefined if the device never skips it.
at::Tensor is_skipped_on(at::Device device, const Multiplier& multiplier);

/// Rounds float32 numbers stochastically to adjacent bfloat16 values. `random_bits` (int32) and `is_nan` are scratch.
void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits, at::Tensor is_nan);

/// Adds steps by this library's kernels if they support the dtypes, else by ATen. Throws for steps that ATen lacks,
/// with the name of the optimizer's class. Does not synchronize.
template <class Step>
void plan_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, const char* optimizer);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/steps.ipp>
#endif
