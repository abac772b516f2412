// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_model.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// One batch, and the objective of it.
struct StepCall {
  std::vector<at::Tensor> batch;
  std::function<Loss()> objective;
  bool tensors_alone = true;  ///< else the batch may hold numbers, which nobody sees
};

/// A forward pass as TorchScript: a function of parameters, buffers and the batch's tensors, in this order, that gives
/// the loss, and its output and target where it has them.
struct StepTrace {
  std::string script;       ///< a file of TorchScript
  std::string operations;   ///< them as a text, without shapes: constants are what tells two traces apart
  Loss loss{at::Tensor()};  ///< with the values that the traced run had
};

/// Runs the objective once, and records what it does.
///
/// Throws `c10::Error` where it reads a value on the host, which would be one for ever, and where it uses a tensor that
/// is neither of the model nor of the batch, unless `constants` may be.
StepTrace trace_of(const StepModel& model, const StepCall& call, bool constants);

/// What the script gives, whose operations autograd can follow.
Loss replayed(const std::string& script, const StepModel& model, const std::vector<at::Tensor>& batch,
              const Loss& traced);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_trace.ipp>
#endif
