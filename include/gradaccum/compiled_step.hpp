// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/loaded_step.hpp>
#include <gradaccum/detail/data/tensors_of.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace gradaccum {

std::ostream& operator<<(std::ostream& stream, const CompiledStepReport& report);

/// A step that CMake's `gradaccum_compile_step(target folder NAME name)` builds into the program.
struct InProgram {
  std::string name;
};

/// An objective with compiled forward and backward, recorded by `save_step` and compiled by tools/compile_step.py.
///
///  auto objective = [](auto& net, auto& batch) {
///    return torch::mse_loss(net->forward(batch.data), batch.target);
///  };
///  ga::CompiledStep step(model, objective, "step");
///  for (auto& batch : batches) {
///    optimizer.backward(step(batch));
///    optimizer.step();
///    optimizer.zero_grad();
///  }
///  std::cout << step.report();
///
/// Returns the result of the objective, a Tensor or a `ga::Loss`, for `loss.backward()`, `ga::GradAccumulator` or
/// `ga::AmpScaler`. As `step(model, batch)`, it replaces the objective of a `ga::Trainer`. Gradients are computed with
/// the loss; backward multiplies them by the seed and adds them to the parameters' gradients. Random numbers are
/// LibTorch's, those that the objective would draw; buffers are updated once.
///
/// Runs the objective itself if there is no graph: for batches of other layouts, in other modes (evaluation, other
/// autocast), and for a model that has changed (frozen, moved). `report()` counts the reasons. Also runs it for the
/// first batch of a layout: loss, gradients, buffers and random numbers must agree up to rounding, or a `c10::Error`
/// names the difference.
///
/// The folder holds code that runs with this program's rights: use only folders that you trust, or build the step in
/// (`ga::InProgram` in place of the folder). Its files must be unchanged since they were compiled, for this version of
/// LibTorch, these parameters and this processor. The model must outlive the step. Copies are the same step; one thread
/// at a time may use it. `create_graph` is not supported; `.in_backward` works, but saves no memory.
///
/// @note For models on the CPU.
template <class Model, class Objective>
class CompiledStep {
  static_assert(detail::model<Model>,
                "CompiledStep: a model is a torch::nn::Module, a ModuleHolder, or a pointer to one");

 public:
  CompiledStep(Model& model, Objective objective, const std::filesystem::path& folder)
      : CompiledStep(model, std::move(objective), detail::StepSource(folder)) {}
  CompiledStep(Model& model, Objective objective, const InProgram& step)
      : CompiledStep(model, std::move(objective), detail::StepSource(step.name)) {}

  template <class Batch>
  auto operator()(Batch&& batch) {
    using Result = std::remove_cvref_t<std::invoke_result_t<Objective&, Model&, Batch&>>;
    static_assert(std::convertible_to<Result, Loss>, "CompiledStep: the objective returns a Tensor or a ga::Loss");
    auto loss = step_->run(detail::tensors_of(batch), [&] { return Loss(std::invoke(objective_, *model_, batch)); });
    if constexpr (std::derived_from<Result, at::Tensor>)
      return loss.mean;
    else
      return loss;
  }
  template <class Batch>
  auto operator()(Model& model, Batch& batch) {
    TORCH_CHECK(&detail::module_of(model) == &detail::module_of(*model_),
                "CompiledStep: step(model, batch) must get the model that it was made for");
    return (*this)(batch);
  }

  const CompiledStepReport& report() const { return step_->report(); }

 private:
  CompiledStep(Model& model, Objective objective, const detail::StepSource& source)
      : model_(&model),
        objective_(std::move(objective)),
        step_(std::make_shared<detail::LoadedStep>(detail::module_of(model), source)) {}

  Model* model_;
  Objective objective_;
  std::shared_ptr<detail::LoadedStep> step_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/compiled_step.ipp>
#endif
