// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

/// Options for `GraphedStep`.
struct GraphedStepOptions {
  std::int64_t graphs = 32;  ///< the most layouts of batches that are captured at a time, at least 1
};

/// The numbers of steps that a `GraphedStep` replayed and ran eagerly, with reasons. Printable.
struct GraphedStepReport {
  std::int64_t replayed = 0, eager = 0;
  std::int64_t captured = 0;                           ///< how often a layout was captured
  std::map<std::string, std::int64_t> why_eager = {};  ///< counts by reason
};
std::ostream& operator<<(std::ostream& stream, const GraphedStepReport& report);

namespace detail {

/// The captured steps of one model.
class CapturedSteps;

std::shared_ptr<CapturedSteps> capture_steps(torch::nn::Module& module, const GraphedStepOptions& options);
/// Replays the step for a batch, which may have to be captured first; runs `objective` if it cannot be replayed.
Loss run_step(CapturedSteps& steps, const std::vector<at::Tensor>& batch, c10::function_ref<Loss()> objective);
const GraphedStepReport& report_of(const CapturedSteps& steps);

}  // namespace detail

/// An objective whose forward and backward are captured as CUDA graphs: the host launches two graphs for each batch in
/// place of hundreds of kernels.
///
///     auto objective = [](auto& net, auto& batch) {
///       return ga::Loss{torch::cross_entropy_loss(net->forward(batch.data), batch.target), batch.data.size(0)};
///     };
///     ga::GraphedStep step(model, objective);
///     for (auto& batch : batches) {
///       optimizer.backward(step(batch));
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     std::cout << step.report();
///
/// Returns the result of the objective, a Tensor or a `ga::Loss`, for `loss.backward()`, `ga::GradAccumulator` or
/// `ga::AmpScaler`. As `step(model, batch)`, it replaces the objective of a `ga::Trainer`. The first batch of a layout
/// (dtypes and shapes, training or evaluation, autocast) is captured without a trace: parameters, gradients, buffers
/// and random numbers stay as they are. Losses, gradients, buffers and random numbers are then those of the objective.
///
/// Captured are operations with their arguments: numbers that the objective computes in C++ stay as they were for that
/// batch, unless they follow from the layout. So the first two batches of a layout also run by the objective, and a
/// `c10::Error` names what differs beyond rounding. An error names what cannot be captured, too: `item()` and whatever
/// else waits for the device, copies from memory that is not pinned, and tensors with gradients that are not the
/// model's. Gradients of a `ga::Loss` are added in one pass, where its seed is a number and no hook waits for them.
///
/// Runs the objective itself where there is no graph, and counts the reasons in `report()`: on a CPU, for tensors on
/// another device than the model, while the loss before has not been backward yet, and for layouts beyond `.graphs`, of
/// which those used most have the graphs. Parameters and buffers that got other memory, or were frozen, are captured
/// anew: at every step, if they move at every step.
///
/// The model must outlive the step. Copies are the same step; one thread at a time may use it. `retain_graph` and
/// `create_graph` are not supported.
///
/// @note Needs LibTorch 2.15, or CUDA's headers with an older one, where an error in a capture leaves the device's
/// random numbers unusable. All graphs share one pool of memory, which holds what the largest needs. Beside it lie
/// their batches, and what the objective needs while one is captured and checked.
template <class Model, class Objective>
class GraphedStep {
  static_assert(gradaccum::model<Model>,
                "GraphedStep: a model is a torch::nn::Module, a ModuleHolder, or a pointer to one");

 public:
  GraphedStep(Model& model, Objective objective, const GraphedStepOptions& options = {})
      : model_(&model),
        objective_(std::move(objective)),
        steps_(detail::capture_steps(detail::module_of(model), options)) {}

  template <class Batch>
  auto operator()(Batch&& batch) {
    using Result = std::remove_cvref_t<std::invoke_result_t<Objective&, Model&, Batch&>>;
    static_assert(std::convertible_to<Result, Loss>, "GraphedStep: the objective returns a Tensor or a ga::Loss");
    auto loss = detail::run_step(*steps_, detail::tensors_of(batch),
                                 [&] { return Loss(std::invoke(objective_, *model_, batch)); });
    if constexpr (std::derived_from<Result, at::Tensor>)
      return loss.mean;
    else
      return loss;
  }
  template <class Batch>
  auto operator()(Model& model, Batch& batch) {
    TORCH_CHECK(&detail::module_of(model) == &detail::module_of(*model_),
                "GraphedStep: step(model, batch) must get the model that it was made for");
    return (*this)(batch);
  }

  const GraphedStepReport& report() const { return detail::report_of(*steps_); }

 private:
  Model* model_;
  Objective objective_;
  std::shared_ptr<detail::CapturedSteps> steps_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/compilation/graphed_step.ipp>
#endif
