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
void take_on_cpu(const std::vector<AdamStep>& steps, double multiplier);
/// Adds steps by our own kernels if there are any, otherwise by ATen.
void add_moves(Moves& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier);
/// Adds steps by ATen's fused operation.
void add_aten_moves(Moves& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier);

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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adam_step.ipp>
#endif
