// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/passes.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <unordered_set>
#include <utility>

namespace gradaccum::detail {

/// The machine epsilon of the coarsest dtype.
GRADACCUM_INLINE double rounding_of(const std::vector<at::Tensor>& parameters) {
  double rounding = 0;
  for (auto& parameter : parameters) {
    const auto dtype = at::toRealValueType(parameter.scalar_type());
    rounding = std::max(rounding, dtype == at::kDouble  ? 0x1p-52
                                  : dtype == at::kFloat ? 0x1p-23
                                  : dtype == at::kHalf  ? 0x1p-10
                                                        : 0x1p-7);
  }
  return rounding;
}

/// The error that rounding may cause in a sum over a batch.
GRADACCUM_INLINE double default_tolerance(double rounding) {
  if (rounding < 1e-15) return 1e-10;
  if (rounding < 1e-6) return 1e-4;
  return 10 * rounding;
}

GRADACCUM_INLINE double largest(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.abs().max().to(at::kDouble).item<double>() : 0.0;
}

GRADACCUM_INLINE double largest(const GradientList& gradients) {
  double all = 0;
  for (auto& gradient : gradients) {
    const auto one = largest(gradient);
    if (!(one <= all)) all = one;  // also if NaN
    if (std::isnan(all)) return all;
  }
  return all;
}

GRADACCUM_INLINE double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return largest(a.defined() ? a : b);
  return largest(a.sub(b));
}

/// max|a - b| / max|b| for each parameter; infinity if one is not finite. If both are rounding noise next to the
/// model's largest gradient, divides by that one: the bias of a layer before a normalisation has a gradient of 0.
GRADACCUM_INLINE std::vector<double> relative_errors(const GradientList& a, const GradientList& b, double rounding) {
  const double all = largest(b), noise = std::min(0.1, 100 * rounding) * all;
  std::vector<double> errors;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double of_a = largest(a[i]), of_b = largest(b[i]), apart = largest_difference(a[i], b[i]);
    const double error = apart == 0 ? 0 : apart / (std::max(of_a, of_b) <= noise ? all : of_b);
    errors.push_back(std::isnan(error) ? std::numeric_limits<double>::infinity() : error);
  }
  return errors;
}

GRADACCUM_INLINE VerifyPasses::VerifyPasses(torch::nn::Module& model, LossOf loss_of, std::vector<std::int64_t> rows,
                                            std::optional<double> tolerance)
    : guard_(model), loss_of_(std::move(loss_of)), rows_(std::move(rows)) {
  std::unordered_set<const void*> known;  // a shared parameter has several names
  for (auto& item : model.named_parameters()) {
    auto& parameter = item.value();
    if (!parameter.requires_grad() || !known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    names_.push_back(item.key());
    parameters_.push_back(parameter);
  }
  TORCH_CHECK(!parameters_.empty(), "verify_accumulation: a parameter of the model must require grad, but none does");
  tolerance_ = tolerance.value_or(default_tolerance(rounding_of(parameters_)));
}

GRADACCUM_INLINE std::vector<double> VerifyPasses::errors(const GradientList& a, const GradientList& b) const {
  return relative_errors(a, b, rounding_of(parameters_));
}

GRADACCUM_INLINE double VerifyPasses::error(const GradientList& a, const GradientList& b) const {
  const auto all = errors(a, b);
  return *std::max_element(all.begin(), all.end());
}

GRADACCUM_INLINE GradientList VerifyPasses::gradients_of(std::int64_t batch, const Modes& modes,
                                                         bool other_random_numbers) {
  guard_.rewind(modes);
  if (other_random_numbers) guard_.use_other_random_numbers();
  const auto loss = loss_of_(batch);
  loss.check();
  Window::check_weight(loss.items);
  if (loss.items > 0) loss.backward();
  return take();
}

/// Parameters without an optimizer.
struct NeverStepped {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  auto& param_groups() { return groups; }
  void step() {}
  void zero_grad() {}
};

GRADACCUM_INLINE GradientList VerifyPasses::accumulated(const Modes& modes, const std::vector<double>* shares) {
  guard_.rewind(modes);
  losses_.clear(), items_.clear();
  NeverStepped parameters{{torch::optim::OptimizerParamGroup(parameters_)}};
  OpenWindow window(std::make_unique<OptimizerOf<NeverStepped>>(parameters), static_cast<std::int64_t>(rows_.size()),
                    {});
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    auto loss = loss_of_(static_cast<std::int64_t>(i));
    loss.check();
    losses_.push_back(loss.mean.detach().to(at::kDouble).item<double>());
    items_.push_back(loss.items);
    if (shares) loss.items = (*shares)[i];
    window.backward(std::move(loss), {});
    window.complete_micro_batch();
  }
  Gradients mean(window.closing());
  if (shares) mean.factor().multiply(mean.items());  // a sum rather than a mean
  if (window.has_weight()) mean.apply();
  return take();
}

GRADACCUM_INLINE void VerifyPasses::forward(const Modes& modes) {
  at::NoGradGuard no_grad;
  guard_.rewind(modes);
  loss_of_(0);
}

GRADACCUM_INLINE GradientList VerifyPasses::take() {
  GradientList taken;
  for (auto& parameter : parameters_) {
    auto& gradient = taken.emplace_back(std::move(parameter.mutable_grad()));
    parameter.mutable_grad().reset();
    if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  }
  return taken;
}

}  // namespace gradaccum::detail
