// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <functional>
#include <optional>
#include <string>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
}  // namespace torch::optim

namespace gradaccum::detail {

/// A reference to an optimizer of any class, so that the code of windows is compiled once.
class AnyOptimizer {
 public:
  virtual ~AnyOptimizer() = default;
  virtual std::vector<at::Tensor> parameters() const = 0;  ///< all parameters, group by group
  virtual at::Device device() const = 0;                   ///< the first parameter's; the CPU if there is none
  /// Steps an optimizer without a `taker`. Unless it takes gradients, the factor must have been applied to `.grad`.
  virtual void step(const Gradients& gradients) = 0;
  virtual void zero_grad(bool set_to_none) = 0;
  virtual std::string name() const = 0;  ///< the class name
  /// Returns true if a part of a parameter may be stepped. False for classes derived from LibTorch's.
  bool steps_by_elements() const;
  bool rates_are_0() const;  ///< true if the learning rate of each group is 0; false if a rate is unknown

  const void* address = nullptr;                       ///< equal through references to any of its base classes
  TakesGradients* taker = nullptr;                     ///< the optimizer, if it derives from TakesGradients
  bool takes_gradients = false;                        ///< also if it only has a function `step(Gradients)`
  torch::optim::Optimizer* torch_optimizer = nullptr;  ///< nullptr for another kind of optimizer
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
    if constexpr (std::derived_from<O, torch::optim::Optimizer>) torch_optimizer = &optimizer;
  }

  std::vector<at::Tensor> parameters() const override { return parameters_of(optimizer_); }
  at::Device device() const override {
    for (auto& group : optimizer_.param_groups())
      for (auto& parameter : group.params())
        if (parameter.defined()) return parameter.device();
    return at::kCPU;
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

/// Returns nothing for user-made options without a learning rate, for which LibTorch's base class throws.
std::optional<double> learning_rate(const torch::optim::OptimizerOptions& options);

/// Runs a closure with gradients enabled, and returns its loss; an undefined tensor without a closure.
at::Tensor loss_of(const std::function<at::Tensor()>& closure);

/// Steps an optimizer with gradients; all steps are made here. Synchronizes, for a 4-byte read, only if gradients are
/// required to be finite and the optimizer leaves that check to the host.
StepResult step_optimizer(AnyOptimizer& optimizer, Gradients gradients);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/any_optimizer.ipp>
#endif
