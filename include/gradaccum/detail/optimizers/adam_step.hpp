// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/optimizers/row_step.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

class Moves;

/// One parameter's step of Adam or AdamW, with all that it reads and writes.
struct AdamStep {
  AdamSettings settings;
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq;
  std::optional<std::uint64_t> rounding_key = {};  ///< of stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< whose moments these are; none: of all
};

/// Whether a sparse gradient moves its rows alone, and those that have moments.
bool steps_by_rows(const AdamSettings& by, const at::Tensor& parameter, const at::Tensor& gradient,
                   const Multiplier& multiplier);
/// Whether what has neither gradient nor moments moves, too.
bool moves_all_rows(const AdamSettings& by);

/// With the state so far, whose tensors may be undefined. A sparse gradient, where that can be done, moves rows.
AdamStep adam_step_of(const AdamSettings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
                      const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq,
                      const Multiplier& multiplier);

/// On the CPU, all in one parallel loop, each element read and written once.
void take_on_cpu(const std::vector<AdamStep>& steps, double multiplier);
/// By kernels of our own where there are any, else by ATen.
void add_moves(Moves& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier);
/// By ATen's fused operation.
void add_aten_moves(Moves& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier);

/// Of the same kind, for a trial.
AdamSettings trial_settings(const AdamSettings& like);

/// ATen's operation on lists of tensors of one device and dtype.
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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adam_step.ipp>
#endif
