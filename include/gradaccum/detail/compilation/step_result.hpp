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

/// All that one forward and backward pass leaves behind.
struct StepResult {
  Loss loss;
  std::vector<at::Tensor> gradients;  ///< of each parameter; undefined where the loss does not depend on it
  std::vector<at::Tensor> buffers;
  RandomState random;
};

/// Runs passes over one batch that all begin alike, and leave buffers and random numbers as they were.
class StepTrial {
 public:
  explicit StepTrial(const StepModel& model) : model_(model), begin_(model.buffers) {}
  StepTrial(const StepTrial&) = delete;
  StepTrial& operator=(const StepTrial&) = delete;
  ~StepTrial() { begin_.put_back(); }

  /// `run` gives the loss, and whatever gradients it computed by itself; else autograd does.
  StepResult result(c10::function_ref<Loss()> run) const;
  StepResult result(c10::function_ref<Loss(std::vector<at::Tensor>& gradients)> run) const;

 private:
  const StepModel& model_;
  ForwardUndo begin_;
};

/// Where the second is not the first, to the rounding of the dtypes that it was computed in: `the gradient of fc.weight
/// differs by 1.0 of its norm`; empty where it is.
std::string difference_of_steps(const StepModel& model, const StepResult& wanted, const StepResult& got);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_result.ipp>
#endif
