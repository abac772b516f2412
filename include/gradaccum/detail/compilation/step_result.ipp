// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_result.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

namespace gradaccum::detail {

GRADACCUM_INLINE TrialResult StepTrial::result(c10::function_ref<Loss()> run) const {
  return result([&](std::vector<at::Tensor>& gradients) {
    auto loss = run();
    loss.check();
    std::vector<at::Tensor> learned;
    for (auto& parameter : model_.parameters)
      if (parameter.requires_grad()) learned.push_back(parameter);
    const auto computed = torch::autograd::grad({loss.mean}, learned, {}, /*retain_graph=*/false,
                                                /*create_graph=*/false, /*allow_unused=*/true);
    auto next = computed.begin();
    for (auto& parameter : model_.parameters) gradients.push_back(parameter.requires_grad() ? *next++ : at::Tensor());
    return loss;
  });
}

GRADACCUM_INLINE TrialResult StepTrial::result(c10::function_ref<Loss(std::vector<at::Tensor>&)> run) const {
  begin_.put_back();
  std::vector<at::Tensor> gradients;
  auto loss = run(gradients);
  return {std::move(loss), std::move(gradients), copies_of(model_.buffers), RandomState()};
}

GRADACCUM_INLINE double norm_in_double(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.numel() == 0 ? 0 : at::linalg_vector_norm(tensor.to(at::kDouble)).item<double>();
}

/// The tolerance for a sum of products, relative to its norm: several thousand roundings.
GRADACCUM_INLINE double tolerance_of(const StepModel& model) {
  auto coarsest = model.parameters.front().scalar_type();
  for (auto& parameter : model.parameters)
    if (c10::elementSize(parameter.scalar_type()) < c10::elementSize(coarsest)) coarsest = parameter.scalar_type();
  if (const auto autocast = model.modes().autocast) coarsest = *autocast;
  if (c10::elementSize(coarsest) == 2) return 0.1;
  return coarsest == at::kDouble ? 1e-9 : 1e-3;
}

/// Compares tensors by the norm of their difference.
class Differences {
 public:
  explicit Differences(double tolerance) : tolerance_(tolerance) {}

  /// Compares two tensors, relative to the norm of `wanted`, or to `scale` if that is larger.
  void compare(const std::string& what, const at::Tensor& wanted, const at::Tensor& got, double scale) {
    if (!text_.empty()) return;
    if (wanted.defined() != got.defined()) {
      text_ = what + (wanted.defined() ? " is missing" : " should not be there");
    } else if (wanted.defined()) {
      const auto norm = std::max(norm_in_double(wanted), scale), off = norm_in_double(wanted - got);
      const bool alike = off <= tolerance_ * norm || (!std::isfinite(norm) && !std::isfinite(norm_in_double(got)));
      if (!alike) text_ = c10::str(what, " differs by ", off / norm, " of its norm");
    }
  }
  const std::string& text() const { return text_; }
  double tolerance() const { return tolerance_; }

 private:
  double tolerance_;
  std::string text_;
};

GRADACCUM_INLINE std::string difference_of_steps(const StepModel& model, const TrialResult& wanted,
                                                 const TrialResult& got) {
  Differences differences(tolerance_of(model));
  differences.compare("the loss", wanted.loss.mean.detach(), got.loss.mean.detach().reshape_as(wanted.loss.mean), 0);
  if (wanted.loss.items != got.loss.items)
    return c10::str("the loss is of ", got.loss.items, " items, not ", wanted.loss.items);
  differences.compare("the output", wanted.loss.output, got.loss.output, 0);
  double norm = 0;
  for (auto& gradient : wanted.gradients)
    if (gradient.defined()) norm = std::hypot(norm, norm_in_double(gradient));
  for (std::size_t i = 0; i < model.parameters.size(); ++i)  // a gradient that cancels may be mere rounding
    differences.compare("the gradient of " + model.parameter_names[i], wanted.gradients[i], got.gradients[i],
                        std::sqrt(differences.tolerance()) * norm);
  for (std::size_t i = 0; i < model.buffers.size(); ++i)
    differences.compare("the buffer " + model.buffer_names[i], wanted.buffers[i], got.buffers[i], 0);
  if (differences.text().empty() && !(wanted.random == got.random)) return "random numbers were drawn otherwise";
  return differences.text();
}

}  // namespace gradaccum::detail
