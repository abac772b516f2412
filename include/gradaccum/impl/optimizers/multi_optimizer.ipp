// SPDX-License-Identifier: Apache-2.0
// Steps several optimizers as one.
#pragma once

#include <gradaccum/optim/multi_optimizer.hpp>

#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

GRADACCUM_INLINE MultiOptimizer::MultiOptimizer(std::vector<NamedOptimizer> optimizers)
    : members_(std::move(optimizers)) {
  TORCH_CHECK(!members_.empty(), "MultiOptimizer: there must be an optimizer, got none");
  std::unordered_set<std::string> names;
  for (auto& [name, optimizer] : members_) {
    detail::check_can_be_wrapped(optimizer, "MultiOptimizer", "pass the optimizer that it wraps");
    TORCH_CHECK(!name.empty() && name.find('.') == name.npos,
                "MultiOptimizer: a name must not be empty or have a dot, got '", name, "'");
    TORCH_CHECK(names.insert(name).second, "MultiOptimizer: each optimizer must have its own name, got two of ", name,
                "; name them: MultiOptimizer({{\"actor\", adam_of_actor}, {\"critic\", adam_of_critic}})");
  }
  check_distinct();
}

/// Throws if a parameter is in two optimizers. Cheap while their lists are unchanged.
GRADACCUM_INLINE void MultiOptimizer::check_distinct() {
  std::vector<const void*> all;
  for (auto& group : param_groups())
    for (auto& parameter : group.params()) all.push_back(parameter.unsafeGetTensorImpl());
  if (all == distinct_) return;
  std::unordered_map<const void*, std::string> seen;
  for (auto& [name, optimizer] : members_) {
    std::size_t index = 0;
    detail::for_each_parameter(optimizer, [&, &name = name](const at::Tensor& parameter) {
      const auto here = c10::str("parameter ", index++, " of ", name);
      const auto [known, is_new] = seen.emplace(parameter.unsafeGetTensorImpl(), here);
      TORCH_CHECK(is_new, "MultiOptimizer: a parameter must be in one optimizer, once, but one of shape ",
                  parameter.sizes(), " is ", known->second, " and ", here);
    });
  }
  distinct_ = std::move(all);
}

GRADACCUM_INLINE void MultiOptimizer::check(const torch::nn::Module& model) const {
  std::unordered_set<const void*> own;
  for (auto& group : param_groups())
    for (auto& parameter : group.params()) own.insert(parameter.unsafeGetTensorImpl());
  std::vector<std::string> forgotten;
  for (auto& item : model.named_parameters())
    if (item.value().requires_grad() && !own.contains(item.value().unsafeGetTensorImpl()))
      forgotten.push_back(item.key());
  TORCH_CHECK(forgotten.empty(),
              "MultiOptimizer: each parameter of the model must be in one of its optimizers, or frozen by "
              "requires_grad_(false), but in none are",
              detail::first_of(forgotten));
}

GRADACCUM_INLINE void MultiOptimizer::step() {
  std::vector<at::Tensor> parameters;
  for (auto& group : param_groups())
    for (auto& parameter : group.params()) parameters.push_back(parameter);
  step(Gradients(parameters));
}

GRADACCUM_INLINE void MultiOptimizer::step(Gradients gradients) { prepare(std::move(gradients))(); }

GRADACCUM_INLINE std::function<void()> MultiOptimizer::prepare(Gradients gradients) {
  check_distinct();
  if (!judges_on_device(gradients) && gradients.overflowed()) return [] {};
  if (!all_take_gradients()) gradients.apply();
  std::unordered_set<const void*> with_gradient;
  for (auto& parameter : gradients.parameters()) with_gradient.insert(parameter.unsafeGetTensorImpl());
  std::vector<std::function<void()>> steps;  // those that were not checked first: they may throw
  for (auto& [name, optimizer] : members_) {
    bool any = false;
    detail::for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
      any = any || with_gradient.contains(parameter.unsafeGetTensorImpl());
    });
    if (!any) continue;
    if (auto* const taker = dynamic_cast<TakesGradients*>(&optimizer))
      steps.push_back(taker->prepare(gradients));
    else
      steps.insert(steps.begin(), [&by = optimizer] { by.step(); });
  }
  return [steps = std::move(steps)] {
    for (auto& step : steps) step();
  };
}

GRADACCUM_INLINE bool MultiOptimizer::judges_on_device(const Gradients& gradients) const {
  return std::ranges::all_of(members_, [&](auto& member) {
    const auto* const taker = dynamic_cast<const TakesGradients*>(&member.optimizer);
    return taker && taker->judges_on_device(gradients);
  });
}

GRADACCUM_INLINE bool MultiOptimizer::all_take_gradients() const {
  return std::ranges::all_of(
      members_, [](auto& member) { return dynamic_cast<const TakesGradients*>(&member.optimizer) != nullptr; });
}

GRADACCUM_INLINE void MultiOptimizer::zero_grad(bool set_to_none) {
  for (auto& [name, optimizer] : members_) optimizer.zero_grad(set_to_none);
}

GRADACCUM_INLINE std::vector<ParamGroupRef> MultiOptimizer::param_groups() const {
  std::vector<ParamGroupRef> all;
  for (auto& [name, optimizer] : members_)
    all.insert(all.end(), optimizer.param_groups().begin(), optimizer.param_groups().end());
  return all;
}

GRADACCUM_INLINE torch::optim::Optimizer& MultiOptimizer::operator[](std::string_view name) const {
  const auto found = std::ranges::find(members_, name, &NamedOptimizer::name);
  TORCH_CHECK(found != members_.end(), "MultiOptimizer: no optimizer is named ", name);
  return found->optimizer;
}

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
