// SPDX-License-Identifier: Apache-2.0
// Presents an accumulator as an optimizer of LibTorch's, and keeps groups and options of both equal.
#pragma once

#include <gradaccum/detail/window/optimizer_facade.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/seen_tensor.hpp>

#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Compares options of LibTorch's class `Options`. Returns nothing if they are of another class.
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
  const auto same = []<class X, class Y>(const X& x, const Y& y) {
    if constexpr (std::is_same_v<X, Y> && !std::is_same_v<X, at::Tensor>)
      return x == y;
    else
      return false;
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](auto& one, auto& other) {
    return one.first == other.first && std::visit(same, one.second, other.second);
  });
}

/// Compares two options. Options of users' classes are compared by learning rate, and by values if they can be
/// archived.
GRADACCUM_INLINE bool same_options(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) {
  using namespace torch::optim;
  std::optional<bool> same;
  for (const auto compare : {compared<AdamOptions>, compared<AdamWOptions>, compared<SGDOptions>,
                             compared<RMSpropOptions>, compared<AdagradOptions>})
    if (!same) same = compare(a, b);
  return same ? *same : learning_rate(a) == learning_rate(b) && same_values(values_of(a), values_of(b));
}

/// Sets options. Keeps their object if only the learning rate has changed, since other code may refer to it.
GRADACCUM_INLINE void set_options(torch::optim::OptimizerParamGroup& group, const torch::optim::OptimizerOptions& to) {
  if (const auto rate = learning_rate(to)) group.options().set_lr(*rate);
  if (!same_options(group.options(), to)) group.set_options(to.clone());
}

GRADACCUM_INLINE OptimizerFacade::OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step,
                                                  std::function<void()> check_saving)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), wrapped.defaults().clone()),
      wrapped_(wrapped),
      step_(std::move(step)),
      check_saving_(std::move(check_saving)) {
  synchronize();
}

GRADACCUM_INLINE torch::Tensor OptimizerFacade::step(LossClosure closure) {
  const auto loss = loss_of(closure);
  synchronize();
  step_();
  return loss;
}

GRADACCUM_INLINE void OptimizerFacade::save(torch::serialize::OutputArchive& archive) const {
  check_saving_();
  const_cast<OptimizerFacade*>(this)->synchronize();  // includes options that were just set
  wrapped_.save(archive);
}

GRADACCUM_INLINE void OptimizerFacade::load(torch::serialize::InputArchive& archive) {
  wrapped_.load(archive);
  param_groups_.clear();
  known_.clear();
  synchronize();
}

GRADACCUM_INLINE void OptimizerFacade::synchronize() {
  auto& groups = wrapped_.param_groups();
  while (groups.size() < param_groups_.size()) wrapped_.add_param_group(param_groups_[groups.size()]);
  while (param_groups_.size() < groups.size()) param_groups_.push_back(groups[param_groups_.size()]);
  while (known_.size() < groups.size()) known_.push_back(groups[known_.size()]);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    auto& ours = param_groups_[i];
    TORCH_CHECK(same_parameters(ours.params(), known_[i].params()), "GradAccumulator: the parameters of group ", i,
                " were changed through a torch::optim::Optimizer&; change them in the wrapped optimizer's group");
    if (!same_options(ours.options(), known_[i].options())) set_options(groups[i], ours.options());
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    param_groups_[i].params() = known_[i].params() = groups[i].params();
    set_options(param_groups_[i], groups[i].options());
    set_options(known_[i], groups[i].options());
  }
}

GRADACCUM_INLINE bool is_accumulator(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const OptimizerFacade*>(&optimizer) != nullptr;
}

GRADACCUM_INLINE void check_can_be_wrapped(const torch::optim::Optimizer& optimizer, const char* part,
                                           const char* instead) {
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              part,
              ": the optimizer must not be LBFGS, which calls its closure several times a step and so has no "
              "micro-batches; use SGD, Adam, AdamW, RMSprop, Adagrad or one of your own");
  TORCH_CHECK(!is_accumulator(optimizer), part, ": the optimizer must not be another accumulator behind a reference; ",
              instead);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
