// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace gradaccum::detail {

class Shards;

/// An optimizer that steps this process's pieces of the parameters, with a window of these. By reference.
class OptimizerOfShards final : public AnyOptimizer {
 public:
  OptimizerOfShards(AnyOptimizer& optimizer, Shards& shards) : optimizer_(optimizer), shards_(shards) {}

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
};

/// As `take_step`, where this process may have none of the pieces: what moves moves for all.
bool take_step_of_shards(AnyOptimizer& optimizer, Shards& shards, Gradients gradients);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/optimizer_of_shards.ipp>
#endif
