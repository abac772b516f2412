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

/// For which batches the recorded step is to hold, and what it may take as it is.
struct SaveStepOptions {
  bool any_rows = true;    ///< try to make one graph for batches of any number of rows; else for those given alone
  bool constants = false;  ///< the objective may use tensors that are neither of the model nor of the batch: they stay
};

/// What `save_step` saved. It can be printed.
struct SavedStep {
  std::filesystem::path folder;
  std::vector<std::string> batches;  ///< the layout of each graph: `Float [64, 784], Long [64]`, `*` for any rows
  std::string only_these_rows = {};  ///< why there is no graph for any number of rows; empty where there is
};
std::ostream& operator<<(std::ostream& stream, const SavedStep& step);

namespace detail {

/// What is recorded for one graph.
struct StepCalls {
  StepCall call;
  std::optional<StepCall> of_a_row_less;  // whose recording tells whether the number of rows is in the graph
};

SavedStep save_steps(torch::nn::Module& module, const std::vector<StepCalls>& calls,
                     const std::filesystem::path& folder, const SaveStepOptions& options);

/// False where the batch's tensors have not as many rows each, or too few to tell.
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

/// `save_step`, below, for batches of several layouts: a graph for each.
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

/// Records a training step, forward and backward, as something that can be compiled: torch.compile for C++ modules.
///
///     auto objective = [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     };
///     std::cout << ga::save_step(model, objective, *batches.begin(), "step");
///
/// `tools/compile_step.py step` compiles it, and `ga::CompiledStep` runs it in the objective's place. All that the
/// objective does with tensors is recorded as it was done for this batch: which operations, how often, with what
/// numbers. Modes count, too: the model is in training mode, and autocast is on if it is to be (`ga::Autocast`).
///
/// `objective(model, batch)`: a Tensor of one element or a `ga::Loss`, as for `ga::Trainer`. `batch`: tensors, as a
/// tuple, a range, a map, `.data` and `.target`, or what `batch_tensors(batch)` says of it. Nothing is changed: not the
/// model, not random numbers. A folder that is there is replaced as a whole if it is a saved step.
///
/// Throws `c10::Error` where the recorded step would be another than the objective: it reads values on the host, uses
/// tensors of its own, has no gradient where backward has one (an `autograd::Function` of one's own, a `NoGradGuard`).
///
/// @note For models on the CPU. Runs the objective some six times.
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
