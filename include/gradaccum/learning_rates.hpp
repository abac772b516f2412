// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <utility>
#include <vector>

namespace gradaccum {

/// Sets the learning rate of an optimizer, in all its parameter groups.
///
///     ga::LearningRates rates(optimizer);
///     ga::lr::Cosine cosine{.peak = 3e-4, .warmup = 100, .total = 5000};
///     for (auto& batch : batches) {
///       rates.set(cosine(optimizer.updates()));
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// Groups keep the ratios that their rates had to the first group's when this was made: make it before a rate is set or
/// loaded. A group that is added later counts as if it had been there. Where all rates were 0, all groups get the same.
///
/// The optimizer has `param_groups()`, as LibTorch's have, and a GradAccumulator; it outlives this. Options that do not
/// tell their rate, or cannot take one, are an error; so is a first rate of 0 beside others. Nothing has changed then.
///
/// @note Does not wait for the device.
class LearningRates {
 public:
  template <class Optimizer>
  requires requires(Optimizer& optimizer) {
    { optimizer.param_groups() } -> std::same_as<std::vector<torch::optim::OptimizerParamGroup>&>;
  }
  explicit LearningRates(Optimizer& optimizer)
      : LearningRates(Groups([&optimizer]() -> auto& { return optimizer.param_groups(); })) {}

  /// The first group's rate, finite and >= 0; the others in proportion.
  void set(double rate);

  /// The first group's rate.
  double current() const;

 private:
  using Groups = std::function<std::vector<torch::optim::OptimizerParamGroup>&()>;

  explicit LearningRates(Groups groups);
  std::vector<torch::optim::OptimizerParamGroup>& groups() const;
  static double rate_of(torch::optim::OptimizerOptions& options);
  void follow();

  Groups groups_;
  double first_ = 0;            // the first group's rate when this was made
  std::vector<double> ratios_;  // of each group's rate to it
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/learning_rates.ipp>
#endif
