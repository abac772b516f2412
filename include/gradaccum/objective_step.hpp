// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: compilation

#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

namespace detail {

/// The recorded steps of a model, and the report of their runs.
template <class Report>
class RecordedSteps {
 public:
  virtual ~RecordedSteps() = default;
  /// Runs the step for a batch; runs `objective` if there is none for it.
  virtual Loss run(std::vector<at::Tensor> batch, c10::function_ref<Loss()> objective) = 0;

  Report report;

 protected:
  Loss eager(const std::string& why, c10::function_ref<Loss()> objective) {
    ++report.eager;
    ++report.why_eager[why];
    return objective();
  }
};

}  // namespace detail

/// The base of `CompiledStep` and `GraphedStep`, which replace a model's objective by a recorded step.
template <class Model, class Objective, class Report>
class ObjectiveStep {
  static_assert(model<Model>,
                "CompiledStep, GraphedStep: a model is a torch::nn::Module, a ModuleHolder, or a pointer");

 public:
  /// Returns what the objective returns for this batch: a Tensor, or a `ga::Loss`.
  template <class Batch>
  auto operator()(Batch&& batch) {
    using Result = std::remove_cvref_t<std::invoke_result_t<Objective&, Model&, Batch&>>;
    static_assert(std::convertible_to<Result, Loss>,
                  "CompiledStep, GraphedStep: the objective returns a Tensor or a ga::Loss");
    auto loss = steps_->run(detail::tensors_of(batch), [&] { return Loss(std::invoke(objective_, *model_, batch)); });
    if constexpr (std::derived_from<Result, at::Tensor>)
      return loss.mean;
    else
      return loss;
  }
  /// Runs the step as the objective of a `ga::Trainer`.
  template <class Batch>
  auto operator()(Model& model, Batch& batch) {
    TORCH_CHECK(&detail::module_of(model) == &detail::module_of(*model_),
                "CompiledStep, GraphedStep: step(model, batch) must get the model that the step was made for");
    return (*this)(batch);
  }

  /// Returns the numbers of recorded and eager runs, with reasons. Printable.
  const Report& report() const { return steps_->report; }

 protected:
  ObjectiveStep(Model& model, Objective objective, std::shared_ptr<detail::RecordedSteps<Report>> steps)
      : model_(&model), objective_(std::move(objective)), steps_(std::move(steps)) {}

 private:
  Model* model_;
  Objective objective_;
  std::shared_ptr<detail::RecordedSteps<Report>> steps_;
};

}  // namespace gradaccum
