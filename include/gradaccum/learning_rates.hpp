// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <utility>
#include <vector>

namespace gradaccum {

/// Sets the learning rate of an optimizer in all its parameter groups.
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
/// Groups keep the ratios of their rates to the first group's at construction, so construct this before a rate is set
/// or loaded. The rate of a group added later counts as if the group had been there from the start. If all rates were
/// 0, all groups get the same.
///
/// The optimizer has `param_groups()`, like LibTorch's and a GradAccumulator, and must outlive this object. Throws,
/// before anything has changed, if options cannot get or set their rate, or if the first rate is 0 and another is not.
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

  /// Sets the first group's rate, which must be finite and >= 0, and the others in proportion.
  void set(double rate);

  /// Returns the first group's rate.
  double current() const;

 private:
  using Groups = std::function<std::vector<torch::optim::OptimizerParamGroup>&()>;

  explicit LearningRates(Groups groups);
  std::vector<torch::optim::OptimizerParamGroup>& groups() const;
  static double rate_of(torch::optim::OptimizerOptions& options);
  void follow();

  Groups groups_;
  double first_ = 0;            // the first group's rate at construction
  std::vector<double> ratios_;  // each group's rate relative to it
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/learning_rates.ipp>
#endif
