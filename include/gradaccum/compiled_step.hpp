// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: compilation

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/objective_step.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

/// The numbers of steps that a `CompiledStep` ran compiled and eagerly, with reasons. Printable.
struct CompiledStepReport {
  std::int64_t compiled = 0, eager = 0;
  std::int64_t replayed = 0;                           ///< compiled steps that were replayed as CUDA graphs
  std::map<std::string, std::int64_t> why_eager = {};  ///< counts by reason
};
std::ostream& operator<<(std::ostream& stream, const CompiledStepReport& report);

/// A step that CMake's `gradaccum_compile_step(target folder NAME name)` builds into the program.
struct InProgram {
  std::string name;
};

namespace detail {

std::shared_ptr<RecordedSteps<CompiledStepReport>> load_step(torch::nn::Module& module,
                                                             const std::filesystem::path& folder);
std::shared_ptr<RecordedSteps<CompiledStepReport>> load_step(torch::nn::Module& module, const InProgram& step);

}  // namespace detail

/// An objective with compiled forward and backward, recorded by `save_step` and compiled by gradaccum-compile-step.
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
/// Returns the objective's result, for `loss.backward()`, `ga::GradAccumulator` or `ga::AmpScaler`; as
/// `step(model, batch)` it replaces the objective of a `ga::Trainer`. Gradients are computed with the loss, and random
/// numbers are the objective's. The model must outlive the step. Copies are the same step, which one thread at a time
/// may use. `create_graph` is not supported; `.in_backward` works, but saves no memory.
///
/// Falling back. Runs the objective itself for other layouts and modes, and for a changed model; `report()` counts the
/// reasons. Compares both for the first batch of a layout, and throws `c10::Error` if they differ by more than
/// rounding. Warns and runs the objective if it has other operations or numbers than the recorded one.
///
/// Trust. The folder has code that runs with this program's rights: use only folders that you trust, or `InProgram`.
/// Throws if files have changed, or are for another LibTorch, model or processor.
///
/// @note On a CUDA device, code that can be captured is replayed as by a `ga::GraphedStep`: it does not synchronize,
/// and does not support `retain_graph`. Code with float16 is not captured, since backward reads the loss scale.
template <class Model, class Objective>
class CompiledStep : public ObjectiveStep<Model, Objective, CompiledStepReport> {
  using Base = ObjectiveStep<Model, Objective, CompiledStepReport>;

 public:
  CompiledStep(Model& model, Objective objective, const std::filesystem::path& folder)
      : Base(model, std::move(objective), detail::load_step(detail::module_of(model), folder)) {}
  CompiledStep(Model& model, Objective objective, const InProgram& step)
      : Base(model, std::move(objective), detail::load_step(detail::module_of(model), step)) {}
};

/// Options for `save_step`.
struct SaveStepOptions {
  bool any_rows = true;    ///< try to make one graph for any number of rows; false: one for each batch's number
  bool constants = false;  ///< allow tensors from outside the model and the batch, which become constants
};

/// The result of `save_step`. Printable.
struct SavedStep {
  std::filesystem::path folder;
  std::vector<std::string> batches;  ///< layout of each graph: `Float [64, 784], Long [64]`, `*` for any rows
  std::string only_these_rows = {};  ///< why there is no graph for any number of rows; empty if there is one
};
std::ostream& operator<<(std::ostream& stream, const SavedStep& step);

namespace detail {

/// A batch and its objective.
struct StepCall {
  std::vector<at::Tensor> batch;
  std::function<Loss()> objective;
  bool tensors_alone = true;  ///< false: the batch may have numbers, which tracing does not record
};

/// The calls recorded for one graph.
struct StepCalls {
  StepCall call;
  std::optional<StepCall> of_a_row_less;  // shows whether the graph contains the number of rows
};

SavedStep save_steps(torch::nn::Module& module, const std::vector<StepCalls>& calls,
                     const std::filesystem::path& folder, const SaveStepOptions& options);

/// Removes the first row from a batch. Returns false if its tensors differ in rows, or have fewer than 3.
template <class Batch>
bool remove_first_row(Batch& batch) {
  const auto tensors = tensors_of(batch);
  for (auto& tensor : tensors)
    if (!tensor.defined() || tensor.dim() == 0 || tensor.size(0) < 3 || tensor.size(0) != tensors.front().size(0))
      return false;
  for_each_of_batch(batch, [](at::Tensor& tensor) { tensor = tensor.narrow(0, 1, tensor.size(0) - 1).contiguous(); });
  return !tensors.empty();
}

template <class Model, class Objective, class Batch>
StepCall step_call(Model& model, Objective& objective, Batch& batch) {
  static_assert(
      std::is_invocable_r_v<Loss, Objective&, Model&, Batch&>,
      "save_step: the objective must be callable as objective(model, batch), and return a Tensor or a ga::Loss");
  return {tensors_of(batch),
          [&model, objective = &objective, &batch] { return Loss(std::invoke(*objective, model, batch)); },
          !tells_its_tensors<Batch>};
}

/// Returns the calls for these batches. Removes a row from their copies `of_a_row_less` if that is possible.
template <class Model, class Objective, class Batch>
std::vector<StepCalls> step_calls(Model& model, Objective& objective, std::vector<Batch>& batches,
                                  std::vector<Batch>& of_a_row_less) {
  std::vector<StepCalls> calls;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    calls.push_back({step_call(model, objective, batches[i]), {}});
    if constexpr (!tells_its_tensors<Batch>)
      if (remove_first_row(of_a_row_less[i]))
        calls.back().of_a_row_less = step_call(model, objective, of_a_row_less[i]);
  }
  return calls;
}

}  // namespace detail

/// Records a step like `save_step`, for batches of several layouts, with a graph for each.
template <class Model, class Objective, class Batch>
SavedStep save_steps(Model&& model, Objective&& objective, const std::vector<Batch>& batches,
                     const std::filesystem::path& folder, const SaveStepOptions& options = {}) {
  auto own = batches, of_a_row_less = batches;
  return detail::save_steps(detail::module_of(model), detail::step_calls(model, objective, own, of_a_row_less), folder,
                            options);
}

/// Records a training step, forward and backward, for compilation: torch.compile for C++ modules.
///
///     auto objective = [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     };
///     std::cout << ga::save_step(model, objective, *batches.begin(), "step");
///
/// `gradaccum-compile-step step` compiles it, and `ga::CompiledStep` runs it in place of the objective. Records the
/// sequence of tensor operations for this batch, with their constants and modes: put the model in training mode, and
/// enable autocast if training uses it (`ga::Autocast`).
///
/// `objective(model, batch)` returns a Tensor of one element or a `ga::Loss`, as for `ga::Trainer`. `batch` is a tuple,
/// range or map of tensors, a struct of `data` and `target`, or has `batch_tensors(batch)`. The model and random
/// numbers do not change. A folder with a saved step is replaced as a whole.
///
/// Throws `c10::Error` if the recorded step would differ from the objective: if it reads values on the host, uses
/// tensors from outside, or has gradients that recording misses (a custom `autograd::Function`, a `NoGradGuard`).
///
/// @note For models on the CPU or on one CUDA device. Runs the objective about six times, or about twenty times if
/// roundings differ.
template <class Model, class Objective, class Batch>
SavedStep save_step(Model&& model, Objective&& objective, const Batch& batch, const std::filesystem::path& folder,
                    const SaveStepOptions& options = {}) {
  return save_steps(model, objective, std::vector<Batch>{batch}, folder, options);
}

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/compilation/compiled_step.ipp>
#endif
