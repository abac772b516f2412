// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>

/// The steps of this library's optimizers. A step has the tensors that it reads and writes, and runs
///
/// - on the CPU by `step_on_cpu` (cpu_steps.hpp): SIMD kernels in one parallel loop; a sparse gradient steps its own
///   rows only (row_steps.hpp);
/// - on a device by `plan_steps` (device_steps.hpp), which adds to a `StepPlan`, per parameter, the library's kernels
///   (`add_kernel_steps`) or, for Adam and SGD only, ATen's operations (`plan_aten_steps`).
namespace gradaccum::detail {

/// The rows of a table that one step by a sparse gradient reads: row_steps.ipp.
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

/// Calls `visit(place, tensor)` for each tensor of the state and its place in the operand.
template <class Step, class Visit>
void for_each_state(const Step& step, typename Step::Operand& operand, const Visit& visit) {
  const auto tensors = step.state();
  std::size_t i = 0;
  std::apply([&](auto&... places) { (visit(places, tensors[i++]), ...); }, Step::state_of(operand));
}

}  // namespace gradaccum::detail
