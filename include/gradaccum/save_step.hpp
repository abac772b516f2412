// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_trace.hpp>
#include <gradaccum/detail/data/tensors_of.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace gradaccum {

/// Options for `save_step`.
struct SaveStepOptions {
  bool any_rows = true;    ///< tries to make one graph for any number of rows; else only for those given
  bool constants = false;  ///< allows tensors from outside the model and the batch: they become constants
};

/// The result of `save_step`. Printable.
struct SavedStep {
  std::filesystem::path folder;
  std::vector<std::string> batches;  ///< layout of each graph: `Float [64, 784], Long [64]`, `*` for any rows
  std::string only_these_rows = {};  ///< reason for no graph for any number of rows; empty if there is one
};
std::ostream& operator<<(std::ostream& stream, const SavedStep& step);

namespace detail {

/// The calls recorded for one graph.
struct StepCalls {
  StepCall call;
  std::optional<StepCall> of_a_row_less;  // shows whether the graph contains the number of rows
};

SavedStep save_steps(torch::nn::Module& module, const std::vector<StepCalls>& calls,
                     const std::filesystem::path& folder, const SaveStepOptions& options);

/// Removes the first row from a batch. Returns false if its tensors differ in rows, or have fewer than 3.
template <class Batch>
bool take_a_row(Batch& batch) {
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

}  // namespace detail

/// Records a step like `save_step`, for batches of several layouts, with a graph for each.
template <class Model, class Objective, class Batch>
SavedStep save_steps(Model&& model, Objective&& objective, const std::vector<Batch>& batches,
                     const std::filesystem::path& folder, const SaveStepOptions& options = {}) {
  std::vector<detail::StepCalls> calls;
  auto own = batches, of_a_row_less = batches;
  for (std::size_t i = 0; i < own.size(); ++i) {
    calls.push_back({detail::step_call(model, objective, own[i]), {}});
    if constexpr (!detail::tells_its_tensors<Batch>)
      if (detail::take_a_row(of_a_row_less[i]))
        calls.back().of_a_row_less = detail::step_call(model, objective, of_a_row_less[i]);
  }
  return detail::save_steps(detail::module_of(model), calls, folder, options);
}

/// Records a training step, forward and backward, for compilation: torch.compile for C++ modules.
///
///     auto objective = [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     };
///     std::cout << ga::save_step(model, objective, *batches.begin(), "step");
///
/// `tools/compile_step.py step` compiles it, and `ga::CompiledStep` runs it in place of the objective. Operations on
/// tensors are recorded as they run for this batch: which they are, how often, and with what constants. Modes are
/// recorded, too: put the model in training mode, and enable autocast if training uses it (`ga::Autocast`).
///
/// `objective(model, batch)` returns a Tensor of one element or a `ga::Loss`, as for `ga::Trainer`. `batch` has
/// tensors: a tuple, a range, a map, `.data` and `.target`, or those of `batch_tensors(batch)`. The model and random
/// numbers stay unchanged. An existing folder is replaced as a whole if it is a saved step.
///
/// Throws `c10::Error` if the recorded step would differ from the objective: if that reads values on the host, uses
/// tensors of its own, or has gradients that recording misses (an `autograd::Function` of your own, a `NoGradGuard`).
///
/// @note For models on the CPU. Runs the objective about six times.
template <class Model, class Objective, class Batch>
SavedStep save_step(Model&& model, Objective&& objective, const Batch& batch, const std::filesystem::path& folder,
                    const SaveStepOptions& options = {}) {
  const std::vector<Batch> one{batch};
  return save_steps(model, objective, one, folder, options);
}

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/save_step.ipp>
#endif
