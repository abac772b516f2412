// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/type_name.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Shows an accumulator as a `torch::optim::Optimizer`, to code that takes one by reference.
///
/// Its groups have the wrapped optimizer's options but no parameters: so `Optimizer::zero_grad`, which is not virtual
/// and cannot know of windows, finds nothing to clear, while schedulers find their learning rates.
class OptimizerFacade final : public torch::optim::Optimizer {
 public:
  /// `step` counts a micro-batch, and clears the gradients after a window.
  OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step)
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), wrapped.defaults().clone()),
        wrapped_(wrapped),
        step_(std::move(step)) {
    synchronise();
  }

  torch::Tensor step(LossClosure closure = nullptr) override {
    torch::Tensor loss;
    if (closure) {
      at::AutoGradMode grad_mode(true);
      loss = closure();
    }
    synchronise();
    step_();
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    for (std::size_t i = 0; i < learning_rates_.size(); ++i)
      tell(param_groups_[i].options(), wrapped_.param_groups()[i].options(), learning_rates_[i]);
    wrapped_.save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    wrapped_.load(archive);
    param_groups_.clear();
    learning_rates_.clear();
    synchronise();
  }

  /// Learning rates and groups go both ways: what was set here reaches the wrapped optimizer, and the reverse.
  void synchronise() {
    auto& groups = wrapped_.param_groups();
    while (groups.size() < param_groups_.size()) {  // added here
      auto& added = param_groups_[groups.size()];
      wrapped_.add_param_group({added.params(), added.options().clone()});
      added.params().clear();
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (i == param_groups_.size()) param_groups_.emplace_back(std::vector<at::Tensor>(), groups[i].options().clone());
      if (i == learning_rates_.size()) learning_rates_.push_back(learning_rate(groups[i].options()));
      synchronise(param_groups_[i].options(), groups[i].options(), learning_rates_[i]);
    }
  }

 private:
  /// None where a user's own options do not tell (LibTorch's base class throws then).
  static std::optional<double> learning_rate(const torch::optim::OptimizerOptions& options) try {
    return options.get_lr();
  } catch (const c10::Error&) {
    return std::nullopt;
  }

  /// `known` is the rate of the last time: it tells which side has changed.
  static void tell(const torch::optim::OptimizerOptions& ours, torch::optim::OptimizerOptions& theirs,
                   const std::optional<double>& known) {
    if (known && ours.get_lr() != *known) theirs.set_lr(ours.get_lr());
  }
  static void synchronise(torch::optim::OptimizerOptions& ours, torch::optim::OptimizerOptions& theirs,
                          std::optional<double>& known) {
    if (!known) return;
    tell(ours, theirs, known);
    known = theirs.get_lr();
    ours.set_lr(*known);
  }

  torch::optim::Optimizer& wrapped_;
  std::function<void()> step_;
  std::vector<std::optional<double>> learning_rates_;
};

/// What a reference can hide, and a type would have told the compiler. `part` wraps the optimizer; `instead` says what
/// a user who wraps an accumulator may have wanted.
inline void check_can_be_wrapped(const torch::optim::Optimizer& optimizer, const char* part, const char* instead) {
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              part,
              ": must not be LBFGS, which calls its closure several times a step and so has no micro-batches; use SGD, "
              "Adam, AdamW, RMSprop, Adagrad or one of your own");
  TORCH_CHECK(!dynamic_cast<const OptimizerFacade*>(&optimizer), part,
              ": wraps an optimizer, not another accumulator behind a reference; ", instead);
}

}  // namespace gradaccum::detail
