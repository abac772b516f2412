// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/types/type_name.hpp>

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

/// One of LibTorch's optimizers in which elements of a parameter do not depend on each other, and which makes its state
/// as it steps. False for what derives from them.
bool steps_by_elements(const torch::optim::Optimizer& optimizer);

/// An optimizer of whatever class, as windows see it: so all that they do is compiled once. By reference.
class AnyOptimizer {
 public:
  virtual ~AnyOptimizer() = default;
  virtual std::vector<at::Tensor> parameters() const = 0;  ///< of all its groups
  virtual bool takes_gradients() const = 0;
  virtual void step(const Gradients& gradients) = 0;  ///< of no taker: they have their true size, unless it takes them
  virtual void zero_grad(bool set_to_none) = 0;
  virtual torch::optim::Optimizer* torch_optimizer() = 0;  ///< itself; none where it is of another kind
  virtual bool steps_by_elements() const = 0;              ///< a part of a parameter may be stepped alone
  virtual std::string name() const = 0;                    ///< its class
  virtual const void* address() const = 0;                 ///< the same through a reference to any of its base classes

  TakesGradients* taker = nullptr;  ///< itself, where it derives from that
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

/// The one place where an optimizer gets its gradients.
///
/// @note Waits for the device only where the gradients are required to be finite and the optimizer leaves it to the
/// host to find out: a 4-byte read.
StepResult take_step(AnyOptimizer& optimizer, Gradients gradients);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/any_optimizer.ipp>
#endif
