// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/errors.hpp>
#include <gradaccum/detail/verification/model_guard.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Forward and backward passes of one batch and of its micro-batches, each from the same state of the model.
class VerifyPasses {
 public:
  using Modes = ModelGuard::Modes;
  using LossOf = std::function<Loss(std::int64_t)>;  ///< of a micro-batch, or of the
  static constexpr std::int64_t whole_batch = -1;

  /// `rows`: of each micro-batch. `tolerance`: if not given, that of the parameters' dtype.
  VerifyPasses(torch::nn::Module& model, LossOf loss_of, std::vector<std::int64_t> rows,
               std::optional<double> tolerance);

  const ModelGuard& model() const { return guard_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::int64_t>& rows() const { return rows_; }
  double tolerance() const { return tolerance_; }

  /// The gradients of one batch: a micro-batch's, or the whole one's.
  GradientList gradients_of(std::int64_t batch, const Modes& modes, bool other_random_numbers = false);
  /// The mean that an accumulator gives.
  GradientList accumulated(const Modes& modes) { return accumulated(modes, nullptr); }
  /// The sum of the micro-batches' gradients, each times its share.
  GradientList accumulated(const Modes& modes, const std::vector<double>& shares) {
    return accumulated(modes, &shares);
  }
  /// A forward pass of the first micro-batch, to be observed.
  void forward(const Modes& modes);

  /// Of each parameter, and the largest of them.
  std::vector<double> errors(const GradientList& a, const GradientList& b) const {
    return relative_errors(a, b, rounding_of(parameters_));
  }
  double error(const GradientList& a, const GradientList& b) const {
    const auto all = errors(a, b);
    return *std::max_element(all.begin(), all.end());
  }
  bool differ(const GradientList& a, const GradientList& b) const { return error(a, b) > tolerance_; }
  /// The micro-batches with these shares do not give what the whole batch gives.
  bool unequal(const Modes& modes, const std::vector<double>& shares) {
    return differ(accumulated(modes, shares), gradients_of(whole_batch, modes));
  }

  /// Of each micro-batch, in the last call of `accumulated`.
  const std::vector<double>& losses() const { return losses_; }
  const std::vector<double>& items() const { return items_; }

 private:
  GradientList accumulated(const Modes& modes, const std::vector<double>* shares);
  GradientList take();

  ModelGuard guard_;
  LossOf loss_of_;
  std::vector<std::int64_t> rows_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<double> losses_, items_;
  double tolerance_;
};

inline VerifyPasses::VerifyPasses(torch::nn::Module& model, LossOf loss_of, std::vector<std::int64_t> rows,
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

inline GradientList VerifyPasses::gradients_of(std::int64_t batch, const Modes& modes, bool other_random_numbers) {
  guard_.rewind(modes);
  if (other_random_numbers) guard_.use_other_random_numbers();
  const auto loss = loss_of_(batch);
  loss.check();
  Window::check_weight(loss.items);
  if (loss.items > 0) loss.backward();
  return take();
}

inline GradientList VerifyPasses::accumulated(const Modes& modes, const std::vector<double>* shares) {
  guard_.rewind(modes);
  losses_.clear(), items_.clear();
  OpenWindow window(static_cast<std::int64_t>(rows_.size()), {});
  window.open(parameters_);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    auto loss = loss_of_(static_cast<std::int64_t>(i));
    loss.check();
    losses_.push_back(loss.mean.detach().to(at::kDouble).item<double>());
    items_.push_back(loss.items);
    if (shares) loss.items = (*shares)[i];
    window.backward(std::move(loss), /*retain_graph=*/{}, /*create_graph=*/false);
    window.complete_micro_batch();
  }
  Gradients mean(window.closing());
  if (shares) mean.factor().multiply(mean.items());  // the sum of the shares
  if (window.has_weight()) mean.apply();
  return take();
}

inline void VerifyPasses::forward(const Modes& modes) {
  at::NoGradGuard no_grad;
  guard_.rewind(modes);
  loss_of_(0);
}

inline GradientList VerifyPasses::take() {
  GradientList taken;
  for (auto& parameter : parameters_) {
    auto& gradient = taken.emplace_back(std::move(parameter.mutable_grad()));
    parameter.mutable_grad().reset();
    if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  }
  return taken;
}

}  // namespace gradaccum::detail
