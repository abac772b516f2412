// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/optimizer_facade.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/types/type_name.hpp>
#include <gradaccum/detail/window/gradient_watch.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

namespace gradaccum::detail {

GRADACCUM_INLINE OptimizerFacade::OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step,
                                                  std::function<void()> check_saving)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), wrapped.defaults().clone()),
      wrapped_(wrapped),
      step_(std::move(step)),
      check_saving_(std::move(check_saving)) {
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

/// Returns nothing for user-made options without a learning rate, for which LibTorch's base class throws.
GRADACCUM_INLINE std::optional<double> learning_rate(const torch::optim::OptimizerOptions& options) try {
  return options.get_lr();
} catch (const c10::Error&) {
  return std::nullopt;
}

/// Compares options of LibTorch's class `Options`. Returns nothing if they are of another.
template <class Options>
std::optional<bool> compared(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) {
  const auto* const first = dynamic_cast<const Options*>(&a);
  const auto* const second = dynamic_cast<const Options*>(&b);
  return first && second ? std::optional(*first == *second) : std::nullopt;
}

GRADACCUM_INLINE Archive::Values values_of(const torch::optim::OptimizerOptions& options) {
  Archive archive;
  const auto copy = options.clone();
  if (auto* itself = dynamic_cast<ArchivesItself*>(copy.get())) itself->state(archive);
  return archive.values();
}

GRADACCUM_INLINE bool same_values(const Archive::Values& a, const Archive::Values& b) {
  const auto same = [](auto& one, auto& other) {
    const auto is_value_of_other = [&](auto& value) {
      using Value = std::remove_cvref_t<decltype(value)>;
      if constexpr (std::is_same_v<Value, at::Tensor>)
        return false;
      else
        return value == std::get<Value>(other.second);
    };
    return one.first == other.first && one.second.index() == other.second.index() &&
           std::visit(is_value_of_other, one.second);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

/// Compares two options: user-made ones by the learning rate, and by their values if they archive themselves.
GRADACCUM_INLINE bool same_options(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) {
  using namespace torch::optim;
  std::optional<bool> same;
  for (const auto compare : {compared<AdamOptions>, compared<AdamWOptions>, compared<SGDOptions>,
                             compared<RMSpropOptions>, compared<AdagradOptions>})
    if (!same) same = compare(a, b);
  return same ? *same : learning_rate(a) == learning_rate(b) && same_values(values_of(a), values_of(b));
}

/// Sets options. Keeps their object if only the learning rate has changed, since others may refer to it.
GRADACCUM_INLINE void set_options(torch::optim::OptimizerParamGroup& group, const torch::optim::OptimizerOptions& to) {
  if (const auto rate = learning_rate(to)) group.options().set_lr(*rate);
  if (!same_options(group.options(), to)) group.set_options(to.clone());
}

GRADACCUM_INLINE void OptimizerFacade::save(torch::serialize::OutputArchive& archive) const {
  check_saving_();
  const_cast<OptimizerFacade*>(this)->synchronise();  // includes what was set just now
  wrapped_.save(archive);
}

GRADACCUM_INLINE void OptimizerFacade::load(torch::serialize::InputArchive& archive) {
  wrapped_.load(archive);
  param_groups_.clear();
  known_.clear();
  synchronise();
}

GRADACCUM_INLINE void OptimizerFacade::synchronise() {
  take_groups();
  tell_options();
  auto& groups = wrapped_.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    param_groups_[i].params() = known_[i].params() = groups[i].params();
    set_options(param_groups_[i], groups[i].options());
    set_options(known_[i], groups[i].options());
  }
}

/// Copies groups that were added on either side to the other.
GRADACCUM_INLINE void OptimizerFacade::take_groups() {
  auto& groups = wrapped_.param_groups();
  while (groups.size() < param_groups_.size()) wrapped_.add_param_group(param_groups_[groups.size()]);
  while (param_groups_.size() < groups.size()) param_groups_.push_back(groups[param_groups_.size()]);
  while (known_.size() < groups.size()) known_.push_back(groups[known_.size()]);
}

GRADACCUM_INLINE void OptimizerFacade::tell_options() {
  auto& groups = wrapped_.param_groups();
  for (std::size_t i = 0; i < known_.size(); ++i) {
    auto& ours = param_groups_[i];
    TORCH_CHECK(same_parameters(ours.params(), known_[i].params()), "GradAccumulator: the parameters of group ", i,
                " were changed through a torch::optim::Optimizer&; change them in the wrapped optimizer's group");
    if (!same_options(ours.options(), known_[i].options())) set_options(groups[i], ours.options());
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
