// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

namespace gradaccum::detail {

/// Shows an accumulator as a `torch::optim::Optimizer`, to code that takes one by reference.
///
/// Its groups have the wrapped optimizer's parameters and copies of its options. `Optimizer::zero_grad`, which is not
/// virtual and cannot know of windows, clears their gradients: so windows that it steps keep their sums apart.
class OptimizerFacade final : public torch::optim::Optimizer {
 public:
  /// `step` counts a micro-batch, and clears the gradients after a window; `check_saving` throws where an optimizer's
  /// own state is not all that there is.
  OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step, std::function<void()> check_saving);

  GRADACCUM_INLINE torch::Tensor step(LossClosure closure = nullptr) override;
  GRADACCUM_INLINE void save(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void load(torch::serialize::InputArchive& archive) override;

  /// Options and groups go both ways: what was set here reaches the wrapped optimizer, and the reverse.
  void synchronise();

 private:
  void take_groups();
  void tell_options();

  torch::optim::Optimizer& wrapped_;
  std::function<void()> step_, check_saving_;
  std::vector<torch::optim::OptimizerParamGroup> known_;  // as they were the last time: it tells which side has changed
};

/// What a reference can hide, and a type would have told the compiler. `part` wraps the optimizer; `instead` says what
/// a user who wraps an accumulator may have wanted.
void check_can_be_wrapped(const torch::optim::Optimizer& optimizer, const char* part, const char* instead);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/optimizer_facade.ipp>
#endif
