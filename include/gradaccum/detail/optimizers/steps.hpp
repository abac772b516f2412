// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

class StepPlan;

/// One parameter's step of Adam or AdamW, with the tensors that it reads and writes.
struct AdamStep {
  AdamSettings settings;
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the moments; nullptr: all
};

/// True if a sparse gradient steps only its own rows and those that have moments.
bool steps_by_rows(const AdamSettings& by, const at::Tensor& parameter, const at::Tensor& gradient,
                   const Multiplier& multiplier);
/// True if rows with neither a gradient nor moments change, too.
bool moves_all_rows(const AdamSettings& by);

/// Prepares a step from the state so far, whose tensors may be undefined. A sparse gradient steps only rows if
/// possible.
AdamStep adam_step_of(const AdamSettings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
                      const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq,
                      const Multiplier& multiplier);

/// Runs the steps on the CPU in one parallel loop that reads and writes each element once.
void step_on_cpu(const std::vector<AdamStep>& steps, double multiplier);
/// Adds steps by our own kernels if there are any, otherwise by ATen.
void plan_steps(StepPlan& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier);
/// Adds steps by ATen's fused operation.
void plan_aten_steps(StepPlan& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier);

/// ATen's fused operation on lists of tensors of one device and dtype.
class FusedAdam {
 public:
  FusedAdam(const AdamSettings& by, const Multiplier& multiplier, at::Device device);
  void operator()(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs) const;

 private:
  AdamSettings by_;
  at::Tensor count_;
  std::optional<at::Tensor> found_inf_;
};

/// One parameter's step of SGD, with the tensors that it reads and writes.
struct SgdStep {
  SgdSettings settings;
  at::Tensor parameter, gradient, momentum_buffer;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the momentum; nullptr: all
};

/// Runs the steps on the CPU in one parallel loop that reads and writes each element once.
void step_on_cpu(const std::vector<SgdStep>& steps, double multiplier);
/// Adds steps by our own kernels if there are any, otherwise by ATen.
void plan_steps(StepPlan& moves, const std::vector<SgdStep>& steps, const Multiplier& multiplier);
/// Adds steps by ATen's fused operation.
void plan_aten_steps(StepPlan& moves, const std::vector<SgdStep>& steps, const Multiplier& multiplier);

/// A tensor of 8-bit moments: a code for each element, in the parameter's memory order, and the largest magnitude of
/// each block of `eight_bit_block` elements.
struct Codes {
  at::Tensor codes, scales;
};

std::int64_t blocks_of(const at::Tensor& tensor);

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

/// One parameter's step with 8-bit moments.
struct Adam8bitStep {
  AdamSettings settings;
  at::Tensor parameter, gradient;
  Codes exp_avg, exp_avg_sq;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the moments; nullptr: all
};

/// Prepares a step from the state so far, whose tensors may be undefined. A sparse gradient steps only its rows, if
/// that is possible and rows are whole blocks.
Adam8bitStep adam8bit_step_of(const AdamSettings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
                              const Codes& exp_avg, const Codes& exp_avg_sq, const Multiplier& multiplier);

/// Runs the steps on the CPU in one parallel loop. Each block is decoded, stepped and encoded while it is in the cache.
void step_on_cpu(const std::vector<Adam8bitStep>& steps, double multiplier);
/// Adds steps by our own kernels if there are any, otherwise by ATen.
void plan_steps(StepPlan& moves, const std::vector<Adam8bitStep>& steps, const Multiplier& multiplier);
/// Adds steps by ATen's fused operation, on moments that are decoded a part at a time.
void plan_aten_steps(StepPlan& moves, const std::vector<Adam8bitStep>& steps, const Multiplier& multiplier);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/step_plan.ipp>
#endif
