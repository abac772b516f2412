// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The memory of one device that moves use in turn. Before `allocate()`, `take` only measures how much they need.
class Scratch {
 public:
  explicit Scratch(at::Device device) : device_(device) {}

  /// Returns uninitialised memory; undefined before `allocate()`.
  at::Tensor take(std::int64_t elements, at::ScalarType dtype);
  /// Returns memory with the sizes and strides of `like`, which must be plain.
  at::Tensor take(const at::Tensor& like, at::ScalarType dtype);
  /// Starts the next move, which reuses the memory of the previous one.
  void begin_turn() { used_ = 0; }

  void allocate();
  at::Device device() const { return device_; }

 private:
  at::Device device_;
  at::Tensor memory_;
  std::int64_t used_ = 0, most_ = 0;  // bytes
};

/// A part of an optimizer's step on a device. Allocates memory only in its constructor and in `take`.
class Move {
 public:
  virtual ~Move() = default;
  virtual void take(Scratch& scratch) = 0;
  virtual void run() = 0;
};

/// One step of an optimizer. All device memory is allocated before any parameter changes, so that running out of it
/// leaves nothing half-stepped.
class StepPlan {
 public:
  void add(at::Device device, std::unique_ptr<Move> move) { moves_.emplace_back(scratch_of(device), std::move(move)); }
  /// Adds a part that needs no device memory.
  void add(std::function<void()> move) { without_scratch_.push_back(std::move(move)); }

  void prepare();
  void run();

 private:
  Scratch* scratch_of(at::Device device);
  /// Moves on devices, which run first, since those on the host may wait for them.
  std::vector<std::pair<Scratch*, std::unique_ptr<Move>>> moves_;
  std::vector<std::function<void()>> without_scratch_;
  std::vector<std::unique_ptr<Scratch>> scratches_;
};

/// A range of a tensor's real numbers in memory order, `[from, to)`; or all of them, in any order.
struct Extent {
  std::int64_t from, to;
  bool whole;

  std::int64_t size() const { return to - from; }
  at::Tensor of(const at::Tensor& tensor) const;
};

/// A parameter and its gradient, to be stepped by ATen's operations or by our own kernel.
struct DeviceOperand {
  at::Tensor parameter, gradient;
  std::optional<std::uint64_t> rounding_key;
  bool by_kernel = false;  ///< our own kernel, which takes dtypes and a factor as they are, and rounds
  bool row_major = false;  ///< for kernels that use rows and columns

  /// True if a copy is needed: for a factor (`multiplied`), the dtype, or the order of the elements.
  bool copies_parameter() const;
  bool copies_gradient(bool multiplied) const;
  bool copied(bool multiplied) const { return copies_parameter() || copies_gradient(multiplied); }

  Extent whole() const;
  at::Tensor layout() const;  ///< a tensor with the sizes and strides of copies
  at::ScalarType dtype_of_parameter() const, dtype_of_gradient() const;  ///< dtypes of copies
  /// Splits the elements into parts of at most `most_copied`, if their order allows it.
  std::vector<Extent> cut() const;
};

/// Returns `found_inf` on `device`, for operations that skip a step by themselves.
std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier);
/// Returns a bool for other operations, true if the step is skipped; undefined if the device never skips it.
at::Tensor left_out_on(at::Device device, const Multiplier& multiplier);

/// Rounds float32 numbers stochastically to adjacent bfloat16 values. `random_bits` (int32) and `is_nan` are scratch.
void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits, at::Tensor is_nan);

/// The parameters and gradients of one move in the memory that is used in the computation, which is their own or
/// copies. All are on one device and, except for our own kernels, computed in one dtype.
class DeviceOperands {
 public:
  explicit DeviceOperands(Multiplier by) : by_(std::move(by)) {}
  void add(const DeviceOperand& operand, const Extent& extent);

  /// A tensor with the sizes and strides of the first operand's copies.
  const at::Tensor& layout() const { return parts_.front().layout; }

  void take(Scratch& scratch);
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
void add_batches(StepPlan& moves, const std::vector<Step>& steps, const Multiplier& multiplier,
                 const BodyFor& body_for) {
  for (auto& batch : batches_of(steps, !multiplier.is_one())) {
    const auto& first = batch.front().step;
    const auto device = first.parameter.device();
    auto body = body_for(first.settings, device);
    moves.add(device, std::make_unique<BatchMove<Step, decltype(body)>>(std::move(batch), multiplier, std::move(body)));
  }
}

/// Steps by our own device kernels, on many tensors at a time, in one pass over their memory.
///
/// A step type provides `kernel_of(kernels, step)`, `kernel_settings(step)`, `kernel_arrays(step)`, which is its state
/// in the order of the kernel's operand, and `plan_aten_steps(moves, steps, multiplier)`.

/// True if kernels can take the tensors, or copies of the same dtype.
bool fits_kernel(const at::Tensor& parameter, const at::Tensor& gradient);

/// Returns the dtypes of the kernel to call.
OperandTypes kernel_types(const at::Tensor& parameter, const at::Tensor& gradient, bool rounded);
template <class Step>
OperandTypes types_of(const Step& step) {
  return kernel_types(step.parameter, step.gradient, step.rounding_key.has_value());
}

/// Launches a kernel for a batch of steps, once for each mix of dtypes and each full table of tensors.
template <class Step>
class KernelBatch {
 public:
  KernelBatch(const DeviceKernels& kernels, const Multiplier& multiplier, at::Device device)
      : kernels_(&kernels), by_(multiplier.moved_to(device)), device_(device) {}

  void operator()(const std::vector<StepPart<Step>>& batch, at::TensorList parameters, at::TensorList gradients) const {
    const auto& first = batch.front().step;
    using Launch = StepLaunch<decltype(kernel_settings(first))>;
    const auto kernel = kernel_of(*kernels_, first);
    const c10::DeviceGuard guard(device_);
    auto* const stream = native_stream(device_);
    std::map<OperandTypes, Launch> launches;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto& [step, extent] = batch[i];
      const auto types = types_of(step);
      auto found = launches.find(types);
      if (found == launches.end()) found = launches.try_emplace(types, kernel_settings(first), by_.pointers()).first;
      auto& launch = found->second;
      if (launch.tensors.full()) {
        kernel(launch, types, stream);
        launch.tensors = {};
      }
      launch.tensors.add(arrays(step, parameters[i], gradients[i]), extent.from, parameters[i].numel(),
                         step.rounding_key.value_or(0));
    }
    for (auto& [types, launch] : launches) kernel(launch, types, stream);
  }

 private:
  static std::array<void*, 6> arrays(const Step& step, const at::Tensor& parameter, const at::Tensor& gradient) {
    std::array<void*, 6> all{parameter.mutable_data_ptr(), const_cast<void*>(gradient.const_data_ptr())};
    std::size_t place = 2;
    for (auto& state : kernel_arrays(step)) all[place++] = state.defined() ? state.mutable_data_ptr() : nullptr;
    return all;
  }

  const DeviceKernels* kernels_;
  Multiplier by_;
  at::Device device_;
};

template <class Step>
void add_kernel_moves(StepPlan& moves, const std::vector<Step>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels) {
  for (auto& batch : batches_of(steps, /*multiplied=*/false, /*by_kernel=*/true)) {
    const auto device = batch.front().step.parameter.device();
    moves.add(device, std::make_unique<BatchMove<Step, KernelBatch<Step>>>(
                          std::move(batch), Multiplier(), KernelBatch<Step>(kernels, multiplier, device),
                          /*by_kernel=*/true));
  }
}

/// Adds steps by our own kernels if these support the dtypes, and the others by ATen.
template <class Step>
void add_moves_by_kernels(StepPlan& moves, const std::vector<Step>& steps, const Multiplier& multiplier) {
  const auto* const kernels = device_kernels();
  if (!kernels) return plan_aten_steps(moves, steps, multiplier);
  const auto is_ours = [](const Step& step) { return fits_kernel(step.parameter, step.gradient); };
  std::vector<Step> ours, others;
  std::partition_copy(steps.begin(), steps.end(), std::back_inserter(ours), std::back_inserter(others), is_ours);
  add_kernel_moves(moves, ours, multiplier, *kernels);
  plan_aten_steps(moves, others, multiplier);
}

/// Finds the gradient of a parameter: its own, or the one in a window.
class GradientOf {
 public:
  GradientOf() = default;
  explicit GradientOf(const Gradients& gradients) : of_window_(true), raw_(gradients.raw()) {
    const auto parameters = gradients.parameters();
    for (std::size_t i = 0; i < raw_.size(); ++i) index_.emplace(parameters[i].unsafeGetTensorImpl(), i);
  }

  bool empty() const { return raw_.empty(); }  ///< true if a window has no gradients
  const at::Tensor& operator()(const at::Tensor& parameter) const {
    if (!of_window_) return parameter.grad();
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    return found == index_.end() ? none_ : raw_[found->second];
  }

 private:
  bool of_window_ = false;
  std::vector<at::Tensor> raw_;
  std::unordered_map<const void*, std::size_t> index_;
  at::Tensor none_;
};

/// The steps of parameters on the CPU, which are taken once those on devices are in flight.
template <class Step>
struct StepsOnCpu {
  const std::vector<Step>* all = nullptr;  // all steps, if every parameter is on the CPU
  std::vector<Step> some = {};             // the steps on the CPU otherwise
  double multiplier = 1;

  const std::vector<Step>& steps() const { return all ? *all : some; }
};

/// Adds the moves of parameters on devices to `moves`. The result refers to `steps`.
template <class Step>
StepsOnCpu<Step> add_steps(StepPlan& moves, const std::vector<Step>& steps, const Multiplier& multiplier) {
  StepsOnCpu<Step> here;
  std::vector<Step> away;
  const auto on_cpu = [](const Step& step) { return step.parameter.device().is_cpu(); };
  if (std::all_of(steps.begin(), steps.end(), on_cpu))
    here.all = &steps;
  else
    std::partition_copy(steps.begin(), steps.end(), std::back_inserter(here.some), std::back_inserter(away), on_cpu);
  plan_steps(moves, away, multiplier);
  if (!here.steps().empty())
    here.multiplier = multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).template item<double>();
  return here;
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/step_plan.ipp>
#endif
