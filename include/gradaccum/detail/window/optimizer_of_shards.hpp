// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace gradaccum::detail {

class Shards;
class WindowGradients;

/// An optimizer that steps this process's pieces of the parameters, with a window of them all. By reference.
class OptimizerOfShards final : public AnyOptimizer {
 public:
  OptimizerOfShards(AnyOptimizer& optimizer, Shards& shards, std::shared_ptr<WindowGradients> window);

  std::vector<at::Tensor> parameters() const override { return optimizer_.parameters(); }
  bool takes_gradients() const override { return optimizer_.takes_gradients(); }
  bool judges_on_device(const Gradients& gradients) const override { return optimizer_.judges_on_device(gradients); }
  GRADACCUM_INLINE void step(const Gradients& gradients) override;
  void zero_grad(bool set_to_none) override { optimizer_.zero_grad(set_to_none); }
  torch::optim::Optimizer* torch_optimizer() override { return optimizer_.torch_optimizer(); }
  bool steps_by_elements() const override { return optimizer_.steps_by_elements(); }
  std::string name() const override { return optimizer_.name(); }

 private:
  AnyOptimizer& optimizer_;
  Shards& shards_;
  std::shared_ptr<WindowGradients> window_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/optimizer_of_shards.ipp>
#endif
