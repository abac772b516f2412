// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace torch::optim {
class LBFGS;  // its header would take 9 s per translation unit
}

namespace gradaccum::optim {

/// A parameter group, by reference.
class ParamGroupRef {
 public:
  ParamGroupRef(torch::optim::OptimizerParamGroup& group) : group_(&group) {}  // NOLINT(google-explicit-constructor)
  std::vector<at::Tensor>& params() const { return group_->params(); }
  torch::optim::OptimizerOptions& options() const { return group_->options(); }

 private:
  torch::optim::OptimizerParamGroup* group_;
};

/// One of the optimizers of a `MultiOptimizer`.
struct NamedOptimizer {
  std::string name;
  torch::optim::Optimizer& optimizer;
};

}  // namespace gradaccum::optim

namespace gradaccum::detail {

/// A reference to an optimizer of any class, so that the code of windows is compiled once.
class AnyOptimizer {
 public:
  virtual ~AnyOptimizer() = default;
  virtual std::vector<at::Tensor> parameters() const = 0;  ///< all parameters, group by group
  virtual at::Device device() const = 0;                   ///< the first parameter's; the CPU if there is none
  /// Returns the groups; nothing if they are not of LibTorch's class.
  virtual std::vector<optim::ParamGroupRef> param_groups() const = 0;
  /// Steps an optimizer without a `taker`. Unless it takes gradients, the factor must have been applied to `.grad`.
  virtual void step(const Gradients& gradients) = 0;
  virtual void zero_grad(bool set_to_none) = 0;
  virtual std::string name() const = 0;                     ///< the class name
  virtual std::optional<double> learning_rate() const = 0;  ///< the first group's; nothing if it has none
  bool rates_are_0() const;  ///< true if the learning rate of each group is 0; false if a rate is unknown

  const void* address = nullptr;    ///< equal through references to any of its base classes
  TakesGradients* taker = nullptr;  ///< the optimizer, if it derives from TakesGradients
  bool takes_gradients = false;     ///< also if it only has a function `step(Gradients)`
  /// LibTorch's optimizers that it is: itself, without a name; a MultiOptimizer's members; none for another kind.
  std::vector<optim::NamedOptimizer> members;
};

template <class O>
class OptimizerOf final : public AnyOptimizer {
 public:
  explicit OptimizerOf(O& optimizer) : optimizer_(optimizer) {
    address = &optimizer;
    if constexpr (std::is_polymorphic_v<O>) {
      address = dynamic_cast<const void*>(&optimizer);
      taker = dynamic_cast<TakesGradients*>(&optimizer);
    }
    takes_gradients = taker || takes_by_itself;
    if constexpr (std::derived_from<O, torch::optim::Optimizer>) members.push_back({"", optimizer});
    if constexpr (requires { optimizer.members(), optimizer.all_take_gradients(); }) {
      for (auto& member : optimizer.members()) members.push_back(member);
      takes_gradients = optimizer.all_take_gradients();
    }
  }

  std::vector<at::Tensor> parameters() const override { return parameters_of(optimizer_); }
  at::Device device() const override {
    for (auto& group : optimizer_.param_groups())
      for (auto& parameter : group.params())
        if (parameter.defined()) return parameter.device();
    return at::kCPU;
  }
  std::vector<optim::ParamGroupRef> param_groups() const override {
    std::vector<optim::ParamGroupRef> all;
    for (auto& group : optimizer_.param_groups())
      if constexpr (std::convertible_to<decltype(group), optim::ParamGroupRef>) all.push_back(group);
    return all;
  }
  std::optional<double> learning_rate() const override try {
    if constexpr (requires { optimizer_.param_groups().front().options().get_lr(); })
      if (!optimizer_.param_groups().empty()) return optimizer_.param_groups().front().options().get_lr();
    return std::nullopt;
  } catch (const c10::Error&) {  // of a group without options, or of options without a rate
    return std::nullopt;
  }
  void step(const Gradients& gradients) override {
    if constexpr (takes_by_itself)
      optimizer_.step(gradients);
    else
      optimizer_.step();
  }
  void zero_grad(bool set_to_none) override {
    if constexpr (requires { optimizer_.zero_grad(set_to_none); })
      optimizer_.zero_grad(set_to_none);
    else
      optimizer_.zero_grad();
  }
  std::string name() const override { return type_name(optimizer_); }

 private:
  static constexpr bool takes_by_itself = gradaccum::takes_gradients<O> && !std::derived_from<O, TakesGradients>;

  O& optimizer_;
};

/// Returns true if a part of a parameter may be stepped. False for classes derived from LibTorch's.
bool steps_by_elements(const torch::optim::Optimizer& optimizer);

/// Returns nothing for user-made options without a learning rate, for which LibTorch's base class throws.
std::optional<double> learning_rate(const torch::optim::OptimizerOptions& options);

/// Returns the names, as in `Muon, AdamW`.
std::string names_of(const std::vector<optim::NamedOptimizer>& optimizers);

/// Runs a closure with gradients enabled, and returns its loss; an undefined tensor without a closure.
at::Tensor loss_of(const std::function<at::Tensor()>& closure);

/// Steps an optimizer with gradients; all steps are made here. Synchronizes, for a 4-byte read, only if gradients are
/// required to be finite and the optimizer leaves that check to the host.
StepResult step_optimizer(AnyOptimizer& optimizer, Gradients gradients);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/any_optimizer.ipp>
#endif
