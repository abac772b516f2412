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
    : members_(std::move(optimizers)), known_groups_(members_.size()) {
  TORCH_CHECK(!members_.empty(), "MultiOptimizer: there must be an optimizer, got none");
  std::unordered_set<std::string> names;
  for (auto& [name, optimizer] : members_) {
    detail::check_can_be_wrapped(optimizer, "MultiOptimizer", "pass the optimizer that it wraps");
    TORCH_CHECK(!name.empty() && name.find('.') == name.npos && name != "window",  // a part of an accumulator's state
                "MultiOptimizer: a name must not be empty, have a dot, or be 'window', got '", name, "'");
    TORCH_CHECK(names.insert(name).second, "MultiOptimizer: each optimizer must have its own name, got two of ", name,
                "; name them: MultiOptimizer({{\"actor\", adam_of_actor}, {\"critic\", adam_of_critic}})");
  }
  check_distinct();
}

/// Throws if a parameter is in two optimizers. Cheap while their lists are unchanged.
GRADACCUM_INLINE void MultiOptimizer::check_distinct() {
  std::vector<const void*> all;
  for (auto& parameter : detail::parameters_of(*this)) all.push_back(parameter.unsafeGetTensorImpl());
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
  for (auto& parameter : detail::parameters_of(*this)) own.insert(parameter.unsafeGetTensorImpl());
  std::vector<std::string> forgotten;
  for (auto& item : model.named_parameters())
    if (item.value().requires_grad() && !own.contains(item.value().unsafeGetTensorImpl()))
      forgotten.push_back(item.key());
  TORCH_CHECK(forgotten.empty(),
              "MultiOptimizer: each parameter of the model must be in one of its optimizers, or frozen by "
              "requires_grad_(false), but in none are",
              detail::first_of(forgotten));
}

GRADACCUM_INLINE void MultiOptimizer::step() { step(Gradients(detail::parameters_of(*this))); }

GRADACCUM_INLINE void MultiOptimizer::step(Gradients gradients) { prepare(std::move(gradients))(); }

GRADACCUM_INLINE std::function<void()> MultiOptimizer::prepare(Gradients gradients) {
  check_distinct();
  if (gradients.rejected() || (!judges_on_device(gradients) && gradients.overflowed())) return [] {};
  if (!all_take_gradients()) gradients.apply();
  std::unordered_set<const void*> with_gradient;
  for (auto& parameter : gradients.parameters()) with_gradient.insert(parameter.unsafeGetTensorImpl());
  std::vector<std::function<void()>> unchecked, prepared;
  for (auto& [name, optimizer] : members_) {
    bool any = false;
    detail::for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
      any = any || with_gradient.contains(parameter.unsafeGetTensorImpl());
    });
    if (!any) continue;
    auto* const taker = dynamic_cast<TakesGradients*>(&optimizer);
    if (auto step = taker ? taker->prepare(gradients) : nullptr)
      prepared.push_back(std::move(step));
    else if (taker)
      unchecked.emplace_back([taker, gradients] { taker->step(gradients); });
    else
      unchecked.emplace_back([&by = optimizer] { by.step(); });
  }
  return [unchecked = std::move(unchecked), prepared = std::move(prepared)] {
    for (auto& step : unchecked) step();  // may throw
    for (auto& step : prepared) step();
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
  for (std::size_t member = 0; member < members_.size(); ++member)
    while (known_groups_[member] < members_[member].optimizer.param_groups().size())
      order_.push_back({member, known_groups_[member]++});
  std::vector<ParamGroupRef> all;
  for (auto& group : order_) all.emplace_back(members_[group.member].optimizer.param_groups().at(group.index));
  return all;
}

GRADACCUM_INLINE torch::optim::Optimizer& MultiOptimizer::operator[](std::string_view name) const {
  const auto found = std::ranges::find(members_, name, &NamedOptimizer::name);
  TORCH_CHECK(found != members_.end(), "MultiOptimizer: no optimizer is named ", name, ", only ",
              detail::names_of(members_));
  return found->optimizer;
}

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
