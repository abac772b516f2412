// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace gradaccum::detail {

/// Returns true for one of LibTorch's own optimizers that steps each element by itself and makes its state as it steps.
/// False for classes derived from them.
bool steps_by_elements(const torch::optim::Optimizer& optimizer);

/// A reference to an optimizer of any class, so that all that windows do is compiled once.
class AnyOptimizer {
 public:
  virtual ~AnyOptimizer() = default;
  virtual std::vector<at::Tensor> parameters() const = 0;  ///< all parameters, group by group
  virtual bool takes_gradients() const = 0;
  /// Steps an optimizer without a `taker`. Unless it takes gradients, `.grad` must have its true size.
  virtual void step(const Gradients& gradients) = 0;
  virtual void zero_grad(bool set_to_none) = 0;
  virtual torch::optim::Optimizer* torch_optimizer() = 0;  ///< nullptr for another kind of optimizer
  virtual bool steps_by_elements() const = 0;              ///< allows a step of a part of a parameter
  virtual std::string name() const = 0;                    ///< the class name
  virtual const void* address() const = 0;                 ///< equal through references to any of its base classes

  TakesGradients* taker = nullptr;  ///< the optimizer, if it derives from TakesGradients
};

template <class O>
class OptimizerOf final : public AnyOptimizer {
 public:
  explicit OptimizerOf(O& optimizer) : optimizer_(optimizer) {
    if constexpr (std::is_polymorphic_v<O>) taker = dynamic_cast<TakesGradients*>(&optimizer);
  }

  std::vector<at::Tensor> parameters() const override { return parameters_of(optimizer_); }
  bool takes_gradients() const override { return taker || takes_by_itself; }
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
  torch::optim::Optimizer* torch_optimizer() override {
    if constexpr (is_torch)
      return &optimizer_;
    else
      return nullptr;
  }
  bool steps_by_elements() const override {
    if (taker) return taker->steps_by_elements();
    if constexpr (is_torch)
      return detail::steps_by_elements(optimizer_);
    else
      return false;
  }
  std::string name() const override { return type_name(optimizer_); }
  const void* address() const override {
    if constexpr (std::is_polymorphic_v<O>)
      return dynamic_cast<const void*>(&optimizer_);
    else
      return &optimizer_;
  }

 private:
  static constexpr bool is_torch = std::derived_from<O, torch::optim::Optimizer>;
  static constexpr bool takes_by_itself = gradaccum::takes_gradients<O> && !std::derived_from<O, TakesGradients>;

  O& optimizer_;
};

/// Steps an optimizer with gradients, the only place that does so.
///
/// @note Waits for the device only if the gradients are required to be finite and the optimizer leaves that check to
/// the host: a 4-byte read.
StepResult step_optimizer(AnyOptimizer& optimizer, Gradients gradients);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/any_optimizer.ipp>
#endif
