// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_model.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// A batch and its objective.
struct StepCall {
  std::vector<at::Tensor> batch;
  std::function<Loss()> objective;
  bool tensors_alone = true;  ///< false: the batch may hold numbers, which tracing does not see
};

/// A forward pass as TorchScript: a function of parameters, buffers and the batch's tensors, in this order. It returns
/// the loss, and its output and target if it has them.
struct StepTrace {
  std::string script;       ///< contents of a TorchScript file
  std::string operations;   ///< the graph as text without shapes, to compare constants of two traces
  Loss loss{at::Tensor()};  ///< values of the traced run
};

/// Runs the objective once, and records its operations.
///
/// Throws `c10::Error` if the objective reads a value on the host, which would become a constant. Throws, too, if it
/// uses a tensor that belongs neither to the model nor to the batch, unless `constants` allows that.
StepTrace trace_of(const StepModel& model, const StepCall& call, bool constants);

/// Runs the script by operations that autograd can follow.
Loss replayed(const std::string& script, const StepModel& model, const std::vector<at::Tensor>& batch,
              const Loss& traced);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_trace.ipp>
#endif
