// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/compilation/objective_step.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <torch/nn/module.h>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace gradaccum {

/// Options for `GraphedStep`.
struct GraphedStepOptions {
  std::int64_t graphs = 32;  ///< the most layouts of batches that are captured at a time, at least 1
};

/// The numbers of steps that a `GraphedStep` replayed and ran eagerly, with reasons. Printable.
struct GraphedStepReport {
  std::int64_t replayed = 0, eager = 0;
  std::int64_t captured = 0;                           ///< how often a layout was captured
  std::int64_t bytes = 0;                              ///< about what the graphs hold of the device, with batches
  std::map<std::string, std::int64_t> why_eager = {};  ///< counts by reason
};
std::ostream& operator<<(std::ostream& stream, const GraphedStepReport& report);

namespace detail {

std::shared_ptr<RecordedSteps<GraphedStepReport>> capture_steps(torch::nn::Module& module,
                                                                const GraphedStepOptions& options);

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
/// else synchronizes, copies from the CPU, and tensors with gradients that are not the model's. Some tensors of
/// the batch may be on the CPU, as the lengths of sequences are; objectives that read them have a graph for the first
/// values of a layout alone. Gradients of a `ga::Loss` are added in one pass,
/// unless a hook waits for them.
///
/// Runs the objective itself where there is no graph, and counts the reasons in `report()`: for a model or a batch on a
/// CPU or on another device, for other values on the CPU if it reads them, while the loss before has not been backward
/// yet, and for layouts beyond `.graphs`, of which those used most have the graphs. Parameters and buffers that got
/// other memory, or were frozen, are captured anew: at every step, if they move at every step.
///
/// The model must outlive the step. Copies are the same step; one thread at a time may use it. `retain_graph` and
/// `create_graph` are not supported.
///
/// @note Needs LibTorch 2.15, or CUDA's headers with an older one, where an error in a capture leaves the device's
/// random numbers unusable. All graphs share one pool of memory, which holds what the largest needs (`bytes` of the
/// report, with their batches). While one is captured and checked, the objective needs its own memory beside it.
template <class Model, class Objective>
class GraphedStep : public ObjectiveStep<Model, Objective, GraphedStepReport> {
 public:
  GraphedStep(Model& model, Objective objective, const GraphedStepOptions& options = {})
      : ObjectiveStep<Model, Objective, GraphedStepReport>(model, std::move(objective),
                                                           detail::capture_steps(detail::module_of(model), options)) {}
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/compilation/graphed_step.ipp>
#endif
