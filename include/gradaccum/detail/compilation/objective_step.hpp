// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {

/// A step in the place of a model's objective. `run_step(steps, tensors, objective)` gives the loss of a batch, and
/// `report_of(steps)` tells how.
template <class Model, class Objective, class Steps>
class ObjectiveStep {
  static_assert(gradaccum::model<Model>,
                "CompiledStep, GraphedStep: a model is a torch::nn::Module, a ModuleHolder, "
                "or a pointer to one");

 public:
  /// Returns what the objective returns for this batch.
  template <class Batch>
  auto operator()(Batch&& batch) {
    using Result = std::remove_cvref_t<std::invoke_result_t<Objective&, Model&, Batch&>>;
    static_assert(std::convertible_to<Result, Loss>,
                  "CompiledStep, GraphedStep: the objective returns a Tensor or a ga::Loss");
    auto loss = run_step(*steps_, tensors_of(batch), [&] { return Loss(std::invoke(objective_, *model_, batch)); });
    if constexpr (std::derived_from<Result, at::Tensor>)
      return loss.mean;
    else
      return loss;
  }
  template <class Batch>
  auto operator()(Model& model, Batch& batch) {
    TORCH_CHECK(&module_of(model) == &module_of(*model_),
                "CompiledStep, GraphedStep: step(model, batch) must get the model that it was made for");
    return (*this)(batch);
  }

  /// Tells how many steps were run in which way, and why. Printable.
  const auto& report() const { return report_of(*steps_); }

 protected:
  ObjectiveStep(Model& model, Objective objective, std::shared_ptr<Steps> steps)
      : model_(&model), objective_(std::move(objective)), steps_(std::move(steps)) {}

 private:
  Model* model_;
  Objective objective_;
  std::shared_ptr<Steps> steps_;
};

}  // namespace gradaccum::detail
