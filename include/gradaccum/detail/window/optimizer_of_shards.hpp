// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

class Shards;
class WindowGradients;

/// Hears of parameters that have been stepped, whosever pieces they are.
using SteppedPlaces = c10::function_ref<void(const std::vector<std::size_t>& places)>;

/// An optimizer that steps this process's pieces of the parameters, with a window of these. By reference.
///
/// If it takes gradients, it steps some of the parameters after the others, so that these can be sent meanwhile.
class OptimizerOfShards final : public AnyOptimizer {
 public:
  OptimizerOfShards(AnyOptimizer& optimizer, Shards& shards, std::shared_ptr<WindowGradients> window,
                    const std::vector<std::size_t>& places, SteppedPlaces stepped)
      : optimizer_(optimizer), shards_(shards), window_(std::move(window)), places_(places), stepped_(stepped) {}

  std::vector<at::Tensor> parameters() const override { return optimizer_.parameters(); }
  bool takes_gradients() const override { return optimizer_.takes_gradients(); }
  bool judges_on_device(const Gradients& gradients) const override { return optimizer_.judges_on_device(gradients); }
  GRADACCUM_INLINE void step(const Gradients& gradients) override;
  void zero_grad(bool set_to_none) override { optimizer_.zero_grad(set_to_none); }
  torch::optim::Optimizer* torch_optimizer() override { return optimizer_.torch_optimizer(); }
  bool steps_by_elements() const override { return optimizer_.steps_by_elements(); }
  std::string name() const override { return optimizer_.name(); }

 private:
  static constexpr std::int64_t enough = 1 << 21;  // elements: stepping some takes far longer than to begin with it

  void step_some(const std::vector<std::size_t>& places);

  AnyOptimizer& optimizer_;
  Shards& shards_;
  std::shared_ptr<WindowGradients> window_;
  const std::vector<std::size_t>& places_;
  SteppedPlaces stepped_;
};

/// As `take_step`, of the parameters in these places, of whose pieces this process may have none: what moves moves for
/// all.
bool take_step_of_shards(AnyOptimizer& optimizer, Shards& shards, const std::shared_ptr<WindowGradients>& window,
                         const std::vector<std::size_t>& places, SteppedPlaces stepped);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/optimizer_of_shards.ipp>
#endif
