// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// An accumulator as a `torch::optim::Optimizer`, for code that takes one by reference.
///
/// Its groups have the wrapped optimizer's parameters and copies of its options. `Optimizer::zero_grad` is not virtual,
/// so it clears gradients inside of windows, too: windows that a facade steps store their sums separately.
class OptimizerFacade final : public torch::optim::Optimizer {
 public:
  /// `step` counts a micro-batch, and clears the gradients after a window. `check_saving` throws when the optimizer's
  /// own state is not the whole state.
  OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step, std::function<void()> check_saving);

  GRADACCUM_INLINE torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  /// Synchronizes groups and options both ways: from here to the wrapped optimizer, and back.
  void synchronize();

 private:
  torch::optim::Optimizer& wrapped_;
  std::function<void()> step_, check_saving_;
  std::vector<torch::optim::OptimizerParamGroup> known_;  // as of the last call, to see which side has changed
};

/// Returns true for an accumulator that was converted to a `torch::optim::Optimizer&`.
bool is_accumulator(const torch::optim::Optimizer& optimizer);

/// Throws for an accumulator or LBFGS behind a reference, where the type does not show it at compile time. `part` wraps
/// the optimizer; `instead` is advice for a user who wraps an accumulator.
void check_can_be_wrapped(const torch::optim::Optimizer& optimizer, const char* part, const char* instead);

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/optimizer_facade.ipp>
#endif
