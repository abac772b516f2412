// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/one_pass_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// State of a parameter, of an optimizer that LibTorch does not have: a step count, and `Derived::tensors()`, pairs of
/// a name and a pointer; one that is undefined is not there. `check(parameter)` throws where they do not fit.
template <class Derived>
class OwnParamState : public torch::optim::OptimizerCloneableParamState<Derived> {
 public:
  std::int64_t step() const { return step_; }
  void step(std::int64_t step) { step_ = step; }

  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step_));
    for (auto& [name, tensor] : const_cast<Derived&>(self()).tensors())  // which are only read
      if (tensor->defined()) archive.write(name, *tensor, /*is_buffer=*/true);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue step;
    archive.read("step", step);
    step_ = step.toInt();
    for (auto& [name, tensor] : static_cast<Derived&>(*this).tensors())
      archive.try_read(name, *tensor, /*is_buffer=*/true);
  }

 private:
  const Derived& self() const { return static_cast<const Derived&>(*this); }
  std::int64_t step_ = 0;
};

/// An optimizer that LibTorch does not have. `Derived` has `name`, `static void check(const Options&)`, and
/// `move(gradient_of, multiplier)` as in OnePassOptimizer.
template <class Derived, class Options, class ParamState>
class OwnOptimizer : public OnePassOptimizer<torch::optim::Optimizer, Derived, ParamState> {
  using OnePass = OnePassOptimizer<torch::optim::Optimizer, Derived, ParamState>;

 public:
  explicit OwnOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = {})
      : OnePass(std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<Options>(defaults)) {
    Derived::check(defaults);
    for (auto& group : groups) add_param_group(group);
  }
  explicit OwnOptimizer(std::vector<at::Tensor> parameters, Options defaults = {})
      : OwnOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

  /// A group's options are all its own. (LibTorch's function replaces those of a type that it does not know.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    if (!group.has_options()) return OnePass::add_param_group(group);
    const auto* const options = dynamic_cast<const Options*>(&group.options());
    TORCH_CHECK(options, Derived::name, ": the options of a group must be ", Derived::name,
                "Options, got those of another optimizer");
    Derived::check(*options);
    OnePass::add_param_group(group);
    this->param_groups().back().set_options(std::make_unique<Options>(*options));
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<ParamState, Options>(archive, *this);
    this->save_rounding(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<ParamState, Options>(archive, static_cast<torch::optim::Optimizer&>(*this));
    this->load_rounding(archive);
  }

 protected:
  static const Options& options_of(const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options());
  }

  /// What is known of a parameter; a new state, which is not the optimizer's yet, where there is nothing.
  ParamState state_of(const at::Tensor& parameter) const {
    const auto known = this->state_.find(parameter.unsafeGetTensorImpl());
    if (known == this->state_.end()) return {};
    const auto& state = static_cast<const ParamState&>(*known->second);
    TORCH_CHECK(state.step() >= 0, Derived::name, ": the step count must be >= 0, got ", state.step());
    return state;
  }
  /// States of parameters whose steps have been taken.
  void keep(std::vector<std::pair<at::Tensor, ParamState>> states) {
    for (auto& [parameter, state] : states)
      this->state_[parameter.unsafeGetTensorImpl()] = std::make_unique<ParamState>(std::move(state));
  }
};

}  // namespace gradaccum::detail
