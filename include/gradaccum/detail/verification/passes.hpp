// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/model_guard.hpp>
#include <gradaccum/detail/verification/split.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum::detail {

using GradientList = std::vector<at::Tensor>;  ///< one per parameter; undefined means zeros

/// The largest absolute value of all elements; NaN if one is NaN.
double largest(const GradientList& gradients);

/// Runs forward and backward passes of one batch and of its micro-batches, each from the same state of the model.
class VerifyPasses {
 public:
  using Modes = ModelGuard::Modes;
  using LossOf = std::function<Loss(std::int64_t)>;

  /// `rows` are the row counts of the micro-batches. `tolerance` defaults to that of the parameters' dtype.
  VerifyPasses(torch::nn::Module& model, LossOf loss_of, std::vector<std::int64_t> rows,
               std::optional<double> tolerance);

  const ModelGuard& model() const { return guard_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::int64_t>& rows() const { return rows_; }
  double tolerance() const { return tolerance_; }

  /// The gradients of a micro-batch, or of the whole batch.
  GradientList gradients_of(std::int64_t batch, const Modes& modes, bool other_random_numbers = false);
  /// The mean gradients, as an accumulator computes them.
  GradientList accumulated(const Modes& modes) { return accumulated(modes, nullptr); }
  /// The sum of the micro-batches' gradients, each times its share.
  GradientList accumulated(const Modes& modes, const std::vector<double>& shares) {
    return accumulated(modes, &shares);
  }
  /// Runs a forward pass of the first micro-batch, to observe its effects.
  void forward(const Modes& modes);

  /// The error of each parameter; `error` is the largest of them.
  std::vector<double> errors(const GradientList& a, const GradientList& b) const;
  double error(const GradientList& a, const GradientList& b) const;
  bool differ(const GradientList& a, const GradientList& b) const { return error(a, b) > tolerance_; }
  /// Returns whether micro-batches with these shares give other gradients than the whole batch.
  bool unequal(const Modes& modes, const std::vector<double>& shares) {
    return differ(accumulated(modes, shares), gradients_of(SplitBatch::whole, modes));
  }

  /// The losses and items of the micro-batches in the last call of `accumulated`.
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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/passes.ipp>
#endif
