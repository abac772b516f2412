// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: compilation

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/objective_step.hpp>

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
  std::int64_t graphs = 32;  ///< maximum number of layouts of batches captured at the same time, >= 1
};

/// The numbers of steps that a `GraphedStep` replayed and ran eagerly, with reasons. Printable.
struct GraphedStepReport {
  std::int64_t replayed = 0, eager = 0;
  std::int64_t captured = 0;                           ///< number of captures
  std::int64_t bytes = 0;                              ///< device memory of the graphs and their batches, about
  std::map<std::string, std::int64_t> why_eager = {};  ///< counts by reason
};
std::ostream& operator<<(std::ostream& stream, const GraphedStepReport& report);

namespace detail {

std::shared_ptr<RecordedSteps<GraphedStepReport>> capture_steps(torch::nn::Module& module,
                                                                const GraphedStepOptions& options);

}  // namespace detail

/// Captures an objective's forward and backward as CUDA graphs: the host launches two graphs per batch in place of
/// hundreds of kernels.
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
/// Returns the objective's result, a Tensor or a `ga::Loss`, for `loss.backward()`, `ga::GradAccumulator` or
/// `ga::AmpScaler`; as `step(model, batch)` it replaces the objective of a `ga::Trainer`. Losses, gradients, buffers
/// and random numbers are the objective's. The model must outlive the step. Copies are the same step, which one thread
/// at a time may use. `retain_graph` and `create_graph` are not supported.
///
/// Capturing. The first batch of a layout (dtypes, shapes and modes) is captured. Numbers that the objective computes
/// in C++ become constants, so it also runs for the first two batches, and a `c10::Error` is thrown if results differ
/// by more than rounding, for `item()` and other synchronization, for copies from the CPU, and for other tensors with
/// gradients than the model's. Without a graph the objective runs itself; `report()` counts the reasons.
///
/// @note Needs CUDA's headers when the program is compiled. An error in a capture may make the device's random numbers
/// unusable. All graphs share one memory pool, as large as the largest needs (`bytes` of the report,
/// with their batches); during a capture and its check the objective needs memory in addition. Falls back to the
/// objective for models or batches on the CPU or another device, while the previous loss has had no backward pass, and
/// for layouts beyond `.graphs`, of which the most used have graphs. Single tensors of a batch may be on the CPU, such
/// as lengths of sequences; if the objective reads them, the graph is for the first values only. Captures again if
/// parameters or buffers get other memory or are frozen: at every step, if that happens at every step. Gradients of a
/// `ga::Loss` are added in one pass, unless a hook waits for them.
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
