// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/own_optimizer.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>

#include <memory>

namespace gradaccum::detail {

template <class Derived, class Options, class State>
OwnOptimizer<Derived, Options, State>::OwnOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                                    Options defaults)
    : OwnOptimizer::OnePassOptimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                                     std::make_unique<Options>(defaults)) {
  Derived::check(defaults);
  for (auto& group : groups) add_param_group(group);
}

template <class Derived, class Options, class State>
OwnOptimizer<Derived, Options, State>::OwnOptimizer(std::vector<at::Tensor> parameters, Options defaults)
    : OwnOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

template <class Derived, class Options, class State>
OwnOptimizer<Derived, Options, State>::~OwnOptimizer() = default;

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (!group.has_options()) return torch::optim::Optimizer::add_param_group(group);
  const auto* const options = dynamic_cast<const Options*>(&group.options());
  TORCH_CHECK(options, Derived::name, ": the options of a group must be ", Derived::name,
              "Options, got those of another optimizer");
  Derived::check(*options);
  torch::optim::Optimizer::add_param_group(group);
  this->param_groups().back().set_options(std::make_unique<Options>(*options));
}

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::save(torch::serialize::OutputArchive& archive) const {
  this->settle();
  make_dense(*this);
  torch::optim::serialize<State, Options>(archive, *this);
  this->save_rounding(archive);
}

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::load(torch::serialize::InputArchive& archive) {
  this->settle();
  torch::optim::serialize<State, Options>(archive, static_cast<torch::optim::Optimizer&>(*this));
  this->load_rounding(archive);
}

template <class Derived, class Options, class State>
State OwnOptimizer<Derived, Options, State>::state_of(const at::Tensor& parameter) const {
  const State* const known = this->known_state(parameter);
  if (!known) return {};
  TORCH_CHECK(known->step() >= 0, Derived::name, ": the step count must be >= 0, got ", known->step());
  return *known;
}

template <class Derived, class Options, class State>
void OwnOptimizer<Derived, Options, State>::keep(std::vector<std::pair<at::Tensor, State>> states) {
  for (auto& [parameter, state] : states)
    this->state_[parameter.unsafeGetTensorImpl()] = std::make_unique<State>(std::move(state));
}

}  // namespace gradaccum::detail

#ifdef GRADACCUM_COMPILED
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw8bit.hpp>

namespace gradaccum::detail {
template class OwnOptimizer<optim::Adafactor, optim::AdafactorOptions, optim::AdafactorParamState>;
template class OwnOptimizer<optim::Adam8bit, optim::Adam8bitOptions, optim::Adam8bitParamState>;
template class OwnOptimizer<optim::AdamW8bit, optim::AdamW8bitOptions, optim::Adam8bitParamState>;
}  // namespace gradaccum::detail
#endif
