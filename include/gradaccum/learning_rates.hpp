// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/type_name.hpp>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
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
/// @note Does not synchronise with the device.
class LearningRates {
 public:
  template <class Optimizer>
  requires requires(Optimizer& optimizer) {
    { optimizer.param_groups() } -> std::same_as<std::vector<torch::optim::OptimizerParamGroup>&>;
  }
  explicit LearningRates(Optimizer& optimizer) : groups_([&optimizer]() -> auto& { return optimizer.param_groups(); }) {
    first_ = rate_of(groups()[0].options());
    follow();
  }

  /// The first group's rate, finite and >= 0; the others in proportion.
  void set(double rate);

  /// The first group's rate.
  double current() const { return groups()[0].options().get_lr(); }

 private:
  std::vector<torch::optim::OptimizerParamGroup>& groups() const {
    auto& groups = groups_();
    TORCH_CHECK(!groups.empty(), "LearningRates: the optimizer must have a parameter group");
    return groups;
  }
  static double rate_of(torch::optim::OptimizerOptions& options);
  void follow();

  std::function<std::vector<torch::optim::OptimizerParamGroup>&()> groups_;
  double first_ = 0;            // the first group's rate when this was made
  std::vector<double> ratios_;  // of each group's rate to it
};

/// LibTorch's own options tell their rate and take one; its base class throws.
inline double LearningRates::rate_of(torch::optim::OptimizerOptions& options) {
  double rate = 0;
  try {
    rate = options.get_lr();
    options.set_lr(rate);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "LearningRates: ", detail::type_name(options), " must override get_lr() and set_lr()");
  }
  TORCH_CHECK(std::isfinite(rate) && rate >= 0, "LearningRates: a group's rate must be finite and >= 0, got ", rate);
  return rate;
}

/// Finds the ratios of groups that are new.
inline void LearningRates::follow() {
  auto& groups = this->groups();
  auto ratios = ratios_;
  ratios.resize(std::min(ratios.size(), groups.size()));
  for (auto i = ratios.size(); i < groups.size(); ++i) {
    const auto rate = rate_of(groups[i].options());
    TORCH_CHECK(first_ > 0 || rate == 0, "LearningRates: the first group's rate must be > 0 where another's is, got 0 ",
                "and ", rate, "; the groups keep the ratios to the first");
    ratios.push_back(rate == first_ ? 1 : rate / first_);
  }
  ratios_ = std::move(ratios);
}

inline void LearningRates::set(double rate) {
  TORCH_CHECK(std::isfinite(rate) && rate >= 0, "LearningRates: a rate must be finite and >= 0, got ", rate);
  follow();
  for (auto ratio : ratios_)
    TORCH_CHECK(std::isfinite(rate * ratio), "LearningRates: a group's rate must be finite, got ", rate, " * ", ratio);
  for (std::size_t i = 0; i < ratios_.size(); ++i) groups()[i].options().set_lr(rate * ratios_[i]);
}

}  // namespace gradaccum
