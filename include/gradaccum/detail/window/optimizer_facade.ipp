// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/optimizer_facade.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE OptimizerFacade::OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), wrapped.defaults().clone()),
      wrapped_(wrapped),
      step_(std::move(step)) {
  synchronise();
}

GRADACCUM_INLINE torch::Tensor OptimizerFacade::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  synchronise();
  step_();
  return loss;
}

/// None where a user's own options do not tell (LibTorch's base class throws then).
GRADACCUM_INLINE std::optional<double> learning_rate(const torch::optim::OptimizerOptions& options) try {
  return options.get_lr();
} catch (const c10::Error&) {
  return std::nullopt;
}

/// `known` is the rate of the last time: it tells which side has changed.
GRADACCUM_INLINE void tell_rate(const torch::optim::OptimizerOptions& ours, torch::optim::OptimizerOptions& theirs,
                                const std::optional<double>& known) {
  if (known && ours.get_lr() != *known) theirs.set_lr(ours.get_lr());
}
GRADACCUM_INLINE void synchronise_rates(torch::optim::OptimizerOptions& ours, torch::optim::OptimizerOptions& theirs,
                                        std::optional<double>& known) {
  if (!known) return;
  tell_rate(ours, theirs, known);
  known = theirs.get_lr();
  ours.set_lr(*known);
}

GRADACCUM_INLINE void OptimizerFacade::save(torch::serialize::OutputArchive& archive) const {
  for (std::size_t i = 0; i < learning_rates_.size(); ++i)
    tell_rate(param_groups_[i].options(), wrapped_.param_groups()[i].options(), learning_rates_[i]);
  wrapped_.save(archive);
}

GRADACCUM_INLINE void OptimizerFacade::load(torch::serialize::InputArchive& archive) {
  wrapped_.load(archive);
  param_groups_.clear();
  learning_rates_.clear();
  synchronise();
}

GRADACCUM_INLINE void OptimizerFacade::synchronise() {
  auto& groups = wrapped_.param_groups();
  while (groups.size() < param_groups_.size()) {  // added here
    auto& added = param_groups_[groups.size()];
    wrapped_.add_param_group({added.params(), added.options().clone()});
    added.params().clear();
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (i == param_groups_.size()) param_groups_.emplace_back(std::vector<at::Tensor>(), groups[i].options().clone());
    if (i == learning_rates_.size()) learning_rates_.push_back(learning_rate(groups[i].options()));
    synchronise_rates(param_groups_[i].options(), groups[i].options(), learning_rates_[i]);
  }
}

GRADACCUM_INLINE void check_can_be_wrapped(const torch::optim::Optimizer& optimizer, const char* part,
                                           const char* instead) {
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              part,
              ": must not be LBFGS, which calls its closure several times a step and so has no micro-batches; use SGD, "
              "Adam, AdamW, RMSprop, Adagrad or one of your own");
  TORCH_CHECK(!dynamic_cast<const OptimizerFacade*>(&optimizer), part,
              ": wraps an optimizer, not another accumulator behind a reference; ", instead);
}

}  // namespace gradaccum::detail
