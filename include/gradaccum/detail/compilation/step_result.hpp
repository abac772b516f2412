// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/forward_undo.hpp>
#include <gradaccum/detail/compilation/step_model.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

namespace gradaccum::detail {

/// The results of one forward and backward pass.
struct TrialResult {
  Loss loss;
  std::vector<at::Tensor> gradients;  ///< one per parameter; undefined if the loss does not depend on it
  std::vector<at::Tensor> buffers;
  RandomState random;
};

/// Runs passes over one batch, each from the same buffers and random state, and restores these at the end.
class StepTrial {
 public:
  explicit StepTrial(const StepModel& model) : model_(model), begin_(model.buffers) {}
  StepTrial(const StepTrial&) = delete;
  StepTrial& operator=(const StepTrial&) = delete;
  ~StepTrial() { begin_.put_back(); }

  /// Runs one pass. Autograd computes the gradients, unless `run` stores them itself.
  TrialResult result(c10::function_ref<Loss()> run) const;
  TrialResult result(c10::function_ref<Loss(std::vector<at::Tensor>& gradients)> run) const;

 private:
  const StepModel& model_;
  ForwardUndo begin_;
};

/// Describes the first difference beyond the rounding of the dtypes used, as `the gradient of fc.weight differs by 1.0
/// of its norm`. Empty if there is none.
std::string difference_of_steps(const StepModel& model, const TrialResult& wanted, const TrialResult& got);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_result.ipp>
#endif
