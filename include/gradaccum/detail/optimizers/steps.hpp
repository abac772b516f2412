// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

/// The steps of our optimizers. A step of a parameter has the tensors that it reads and writes, and is taken
///
/// - on the CPU by `step_on_cpu`: SIMD kernels in one parallel loop; a sparse gradient there steps its own rows alone;
/// - on a device by `plan_steps`, which chooses for each parameter between our own kernels (`add_kernel_steps`) and
///   ATen's operations (`plan_aten_steps`), and adds to a `StepPlan`.
///
/// A process that steps shards, or a parameter in backward, takes the same ways with pieces or single parameters.
namespace gradaccum::detail {

/// A tensor of a parameter's state, and its layout in case there is none yet.
struct Moments {
  at::Tensor tensor;
  at::ScalarType type;
  std::int64_t per_row;   ///< elements for each row of the parameter
  std::int64_t zero = 0;  ///< the value that represents zero
};

/// The rows of a table that one step by a sparse gradient reads. The step is bitwise equal to the dense one in the rows
/// that that would change. Moments are sparse tensors with the rows that have ever had a gradient; the moments of all
/// other rows are zero.
class StepRows {
 public:
  /// Collects the rows. `moments` must be all that the parameter has.
  StepRows(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Moments>& moments);

  /// The values of the gradient's rows, without duplicates.
  const at::Tensor& gradient() const { return gradient_; }
  /// Returns the rows' moments, zeros for new rows, followed by scratch rows for `run`.
  at::Tensor values_of(const Moments& moments) const;
  /// Returns the rows' values as a sparse tensor of the parameter's state.
  at::Tensor state_of(const at::Tensor& values, const at::Tensor& parameter) const;

  /// A row's number in the table, its index in the moments, and that in the gradient, or a negative number.
  struct Row {
    std::int64_t number, moments, gradient;
  };
  /// Calls `body` for each row on LibTorch's threads; with `all`, also for rows without moments, whose zeros must stay.
  void run(bool all, c10::function_ref<void(const Row&)> body) const;

 private:
  static constexpr std::int64_t tasks = 64;

  std::int64_t count() const { return rows_.size(0); }

  at::Tensor rows_, gradient_;                  // row numbers (int64) in the order of first use; the gradient's values
  std::int64_t had_ = 0;                        // number of rows that had moments before
  std::vector<std::int32_t> moments_, values_;  // by row of the table: its index in `rows_` and in the gradient, or -1
};

/// One parameter's step of Adam or AdamW.
struct AdamStep {
  AdamSettings settings;
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the moments; nullptr: all

  static auto kernel(const DeviceKernels& kernels) { return kernels.adam; }
  const AdamSettings& kernel_settings() const { return settings; }
  std::array<at::Tensor, 3> state() const {
    return {exp_avg, exp_avg_sq, settings.amsgrad ? max_exp_avg_sq : at::Tensor()};
  }
};

/// One parameter's step of SGD.
struct SgdStep {
  SgdSettings settings;
  at::Tensor parameter, gradient, momentum_buffer;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the momentum; nullptr: all

  static auto kernel(const DeviceKernels& kernels) { return kernels.sgd; }
  const SgdSettings& kernel_settings() const { return settings; }
  std::array<at::Tensor, 1> state() const { return {settings.momentum != 0 ? momentum_buffer : at::Tensor()}; }
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

  static auto kernel(const DeviceKernels& kernels) { return kernels.adam8bit; }
  Adam8bitSettings kernel_settings() const { return {settings, {signed_map(), second_moment_map()}}; }
  std::array<at::Tensor, 4> state() const {
    return {exp_avg.codes, exp_avg_sq.codes, exp_avg.scales, exp_avg_sq.scales};
  }
};

/// One parameter's step of Adafactor. The state is row-major.
struct AdafactorStep {
  AdafactorSettings settings;
  at::Tensor parameter, gradient, row_var, col_var, variance, exp_avg;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
};

/// Returns zeros with the sizes and strides of `like`, which must be plain (see is_plain()).
Codes zero_codes(const at::Tensor& like, bool is_signed);

/// Returns the elements of a plain tensor in memory order, a block per row. Pads the last row with `fill`.
at::Tensor in_blocks(const at::Tensor& plain, double fill);

/// Returns the codes' values in float32. Works on any device.
at::Tensor decoded(const Codes& moments, bool is_signed);

/// Returns the nearest codes of a plain float32 tensor. Ties go to the smaller value (in the kernels: to the one nearer
/// to 0). Works on any device.
Codes encoded(const at::Tensor& numbers, bool is_signed);

/// Returns the moments in the parameter's element order; zeros if there are none. Throws if loaded moments do not fit.
Codes checked_state(const Codes& moments, const at::Tensor& parameter, bool is_signed, const char* name);

/// Each prepares a step from the state so far, whose tensors may be undefined. A sparse gradient steps only rows if
/// that is possible; with 8-bit moments, if rows are whole blocks. `sgd_step_of` needs a momentum only if the settings
/// have one.
AdamStep adam_step_of(const AdamSettings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
                      const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq,
                      const Multiplier& multiplier);
SgdStep sgd_step_of(const SgdSettings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
                    const at::Tensor& momentum_buffer, const Multiplier& multiplier);
Adam8bitStep adam8bit_step_of(const AdamSettings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
                              const Codes& exp_avg, const Codes& exp_avg_sq, const Multiplier& multiplier);

/// Returns a step's moments in the form of the parameter's state.
template <class Step>
at::Tensor state_tensor(const Step& step, const at::Tensor& moments) {
  return step.rows ? step.rows->state_of(moments, step.parameter) : moments;
}

/// Runs the steps of parameters on the CPU in one parallel loop that reads and writes each element once (8-bit moments
/// are decoded, stepped and encoded while they are in the cache), Adafactor's in a few passes. In groups, if many
/// parameters have to be copied first. Steps on devices are left out.
void step_on_cpu(const std::vector<AdamStep>& steps, double multiplier);
void step_on_cpu(const std::vector<SgdStep>& steps, double multiplier);
void step_on_cpu(const std::vector<Adam8bitStep>& steps, double multiplier);
void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);

/// Returns the factor as a number of the host, which may have to wait for the device.
double host_number(const Multiplier& multiplier);

/// Memory of one device that the parts of a step use in turn. Before `allocate()`, `tensor` only counts the bytes.
class Scratch {
 public:
  explicit Scratch(at::Device device) : device_(device) {}

  /// Returns uninitialised memory; undefined before `allocate()`.
  at::Tensor tensor(std::int64_t elements, at::ScalarType dtype) {
    constexpr std::int64_t alignment = 256;  // for operations that read several elements at once
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

/// The parts of one step of an optimizer on devices. All device memory is allocated before any parameter changes, so
/// that running out of it leaves nothing half-stepped.
class StepPlan {
 public:
  void add(at::Device device, std::unique_ptr<DeviceStep> step) {
    steps_.emplace_back(&scratch_.try_emplace(device, device).first->second, std::move(step));
  }
  /// Adds a part that needs no device memory. It runs after those that do.
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
    return gradient.scalar_type() == parameter.scalar_type() ? dtype_of_parameter() : state_type(parameter);
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
  std::vector<Extent> cut() const;
};

/// Returns `found_inf` on `device`, for operations that skip a step by themselves.
std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier);
/// Returns a bool for other operations, true if the step is skipped; undefined if the device never skips it.
at::Tensor is_skipped_on(at::Device device, const Multiplier& multiplier);

/// Rounds float32 numbers stochastically to adjacent bfloat16 values. `random_bits` (int32) and `is_nan` are scratch.
void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits, at::Tensor is_nan);

/// The parameters and gradients of one part of a step in the memory that is used in the computation, which is their own
/// or copies. All are on one device and, except for our own kernels, computed in one dtype.
class DeviceOperands {
 public:
  explicit DeviceOperands(Multiplier by) : by_(std::move(by)) {}
  void add(const DeviceOperand& operand, const Extent& extent);

  /// A tensor with the sizes and strides of the first operand's copies.
  const at::Tensor& layout() const { return parts_.front().layout; }

  void allocate(Scratch& scratch);
  /// Fills the copies, and multiplies the gradients by the factor.
  void read();
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> gradients() const;
  /// Ends the step: rounds copies stochastically if requested, and writes the parameters back.
  void write_back() const;

 private:
  struct Part {
    DeviceOperand of;
    at::Tensor layout;               // has the sizes and strides of copies
    at::Tensor parameter, gradient;  // the user's
    at::Tensor parameter_copy = {}, gradient_copy = {}, random_bits = {}, is_nan = {};

    const at::Tensor& stepped() const { return parameter_copy.defined() ? parameter_copy : parameter; }
  };

  std::vector<Part> parts_;
  Multiplier by_;
  at::Tensor factor_, wide_factor_;  // known only on the device: in the computation's dtype, and in float64
};

/// One parameter's step on a device, or a part of it.
template <class Step>
struct StepPart {
  Step step;
  Extent extent;
};

/// Adafactor's kernels use rows and columns.
template <class Step>
DeviceOperand operand_of(const Step& step, bool by_kernel = false) {
  return {step.parameter, step.gradient, step.rounding_key, by_kernel,
          /*row_major=*/by_kernel && std::is_same_v<Step, AdafactorStep>};
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
    if (const auto operand = operand_of(step, by_kernel);
        operand.copies_parameter() || operand.copies_gradient(multiplied))
      for (auto& extent : operand.cut()) add(step, extent, extent.size());
    else
      add(step, operand.whole(), 0);
  return batches;
}

/// A batch's step, which `body(batch, parameters, gradients)` runs.
template <class Step, class Body>
class BatchStep final : public DeviceStep {
 public:
  BatchStep(std::vector<StepPart<Step>> batch, const Multiplier& multiplier, Body body, bool by_kernel)
      : batch_(std::move(batch)), operands_(multiplier), body_(std::move(body)) {
    for (auto& part : batch_) operands_.add(operand_of(part.step, by_kernel), part.extent);
  }
  void allocate(Scratch& scratch) override { operands_.allocate(scratch); }
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
/// Our own kernels apply the factor themselves.
template <class Step, class BodyFor>
void add_batches(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, bool by_kernel,
                 const BodyFor& body_for) {
  for (auto& batch : batches_of(steps, !by_kernel && !multiplier.is_one(), by_kernel)) {
    const auto& first = batch.front().step;
    const auto device = first.parameter.device();
    auto body = body_for(first.settings, device);
    plan.add(device, std::make_unique<BatchStep<Step, decltype(body)>>(
                         std::move(batch), by_kernel ? Multiplier() : multiplier, std::move(body), by_kernel));
  }
}

/// Returns the dtypes of the kernel to call.
template <class Step>
OperandTypes types_of(const Step& step) {
  const auto dtype = step.parameter.scalar_type();
  const bool same = step.gradient.scalar_type() == dtype;
  return {at::toRealValueType(dtype), at::toRealValueType(same ? dtype : state_type(step.parameter)),
          step.rounding_key.has_value()};
}

/// Launches our own kernel for a batch of steps, once for each mix of dtypes and each full table of tensors.
template <class Step>
void launch_kernel(const DeviceKernels& kernels, const Multiplier& by, at::Device device,
                   const std::vector<StepPart<Step>>& batch, at::TensorList parameters, at::TensorList gradients) {
  const auto& first = batch.front().step;
  using Launch = StepLaunch<std::remove_cvref_t<decltype(first.kernel_settings())>>;
  const auto kernel = first.kernel(kernels);
  const c10::DeviceGuard guard(device);
  auto* const stream = native_stream(device);
  std::map<OperandTypes, Launch> launches;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto& [step, extent] = batch[i];
    const auto types = types_of(step);
    auto found = launches.find(types);
    if (found == launches.end()) found = launches.try_emplace(types, first.kernel_settings(), by.pointers()).first;
    auto& launch = found->second;
    if (launch.tensors.full()) {
      kernel(launch, types, stream);
      launch.tensors = {};
    }
    std::array<void*, 6> arrays{parameters[i].mutable_data_ptr(), const_cast<void*>(gradients[i].const_data_ptr())};
    std::size_t next = 2;
    for (auto& tensor : step.state()) arrays[next++] = tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
    launch.tensors.add(arrays, extent.from, parameters[i].numel(), step.rounding_key.value_or(0));
  }
  for (auto& [types, launch] : launches) kernel(launch, types, stream);
}

/// Adds steps by our own device kernels, on many tensors at a time, in one pass over their memory; Adafactor's in a few
/// passes.
template <class Step>
void add_kernel_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/true, [&](const auto&, at::Device device) {
    return [&kernels, by = multiplier.moved_to(device), device](const std::vector<StepPart<Step>>& batch,
                                                                at::TensorList p, at::TensorList g) {
      launch_kernel(kernels, by, device, batch, p, g);
    };
  });
}
void add_kernel_steps(StepPlan& plan, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels);

/// Adds steps by ATen's fused operation, 8-bit moments being decoded a part at a time; Adafactor's by a few operations.
void plan_aten_steps(StepPlan& plan, const std::vector<AdamStep>& steps, const Multiplier& multiplier);
void plan_aten_steps(StepPlan& plan, const std::vector<SgdStep>& steps, const Multiplier& multiplier);
void plan_aten_steps(StepPlan& plan, const std::vector<Adam8bitStep>& steps, const Multiplier& multiplier);
void plan_aten_steps(StepPlan& plan, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);

/// Adds steps of parameters with elements: by our own kernels if these support the dtypes, the others by ATen. Does not
/// wait for the device.
template <class Step>
void plan_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier) {
  const auto* const kernels = device_kernels();
  std::vector<Step> ours, others;
  for (auto& step : steps) {
    const auto& parameter = step.parameter;
    const auto type = parameter.scalar_type();
    // A gradient wider than the state may exceed float32 before it is multiplied.
    const bool is_ours = kernels && has_kernels(at::toRealValueType(type)) && type != at::kComplexHalf &&
                         parameter.is_cuda() &&
                         at::elementSize(step.gradient.scalar_type()) <= at::elementSize(state_type(parameter));
    if (parameter.numel() > 0) (is_ours ? ours : others).push_back(step);
  }
  if (kernels) add_kernel_steps(plan, ours, multiplier, *kernels);
  plan_aten_steps(plan, others, multiplier);
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/steps.ipp>
#endif
