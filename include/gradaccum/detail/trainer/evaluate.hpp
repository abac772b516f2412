// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/samples_of.hpp>
#include <gradaccum/detail/trainer/mode_guard.hpp>
#include <gradaccum/metrics.hpp>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <utility>

namespace gradaccum::detail {

/// What is around an evaluation: evaluation mode, no gradients.
class EvaluationScope {
 public:
  explicit EvaluationScope(torch::nn::Module& model) : mode_(model, false) {}

 private:
  ModeGuard mode_;
  at::NoGradGuard no_grad_;
};

/// The mean loss and other metrics over the batches, or of the first alone.
template <class Batches, class LossOf, metric... Metrics>
Evaluation evaluate(torch::nn::Module& model, Batches& batches, const LossOf& loss_of, bool first_alone,
                    Metrics... metrics) {
  const EvaluationScope scope(model);
  Evaluator<Metrics...> evaluator(std::move(metrics)...);
  for (auto&& batch : batches) {
    evaluator.add(loss_of(batch), samples_of(batch));
    if (first_alone) break;
  }
  return evaluator.result();
}

}  // namespace gradaccum::detail
