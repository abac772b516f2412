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

/// A step that `gradaccum_compile_step(target folder NAME name)` of CMake builds into the program.
struct InProgram {
  std::string name;
};

/// An objective whose forward and backward pass are compiled: what `save_step` wrote and tools/compile_step.py
/// compiled.
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
/// It gives what the objective gives, a Tensor or a `ga::Loss`, for `loss.backward()`, `ga::GradAccumulator`,
/// `ga::AmpScaler` or, as `step(model, batch)`, in the objective's place for `ga::Trainer`. Gradients are there with
/// the loss; backward hands them to the parameters, times the seed. Random numbers are LibTorch's, those that the
/// objective would draw; buffers move once.
///
/// The objective itself runs where there is no graph: for batches of other layouts, in other modes (evaluation, other
/// autocast) and for a model that has been changed (frozen, moved); `report()` counts why. It runs too when a layout is
/// met for the first time: loss, gradients, buffers and random numbers must be the same to rounding, or it throws
/// `c10::Error` that names what differs.
///
/// The folder holds code, which runs as this program: give none that you do not trust, or build it in (`ga::InProgram`
/// in the folder's place). It must be as it was compiled, to
/// the byte, for this version of LibTorch, these parameters and this processor. The model outlives it. Copies are the
/// same step; it is used by one thread at a time. Not with `create_graph`; `.in_backward` works and saves no memory.
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
