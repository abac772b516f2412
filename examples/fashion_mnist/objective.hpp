// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <functional>
#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/graphed_step.hpp>

#include "setup.hpp"

/// The objective of both loops, and the compiled or captured steps that replace it.
namespace fashion_mnist {

/// Returns a batch's loss, its number of images, and the logits for metrics.
inline ga::Loss objective(Network& model, const ga::data::Batch& batch) {
  const auto logits = model->forward(batch.data);
  return ga::Loss{torch::cross_entropy_loss(logits, batch.target), batch.target.size(0)}.with(logits, batch.target);
}

using Objective = std::function<ga::Loss(Network&, const ga::data::Batch&)>;
using CompiledObjective = ga::CompiledStep<Network, decltype(&objective)>;
using GraphedObjective = ga::GraphedStep<Network, decltype(&objective)>;

/// Returns the objective, the step that --compile names, or the step's graphs on a GPU.
inline Objective training_objective(Setup& setup, const Options& options) {
  if (!options.compile.empty()) return CompiledObjective(setup.model, &objective, options.compile);
  if (options.replays_graphs()) return GraphedObjective(setup.model, &objective);
  return objective;
}

inline void print_steps(const Objective& trained) {
  if (const auto* const step = trained.target<CompiledObjective>()) fmt::print("{}", fmt::streamed(step->report()));
  if (const auto* const step = trained.target<GraphedObjective>()) fmt::print("{}", fmt::streamed(step->report()));
}

/// Records the training step of these options for tools/compile_step.py.
inline void record_step(const Options& options, const Dataset& dataset) {
  Setup setup(options, dataset);
  const ga::Autocast autocast(options.device, options.autocast_type(), options.mixed_precision());
  fmt::print("{}", fmt::streamed(ga::save_step(setup.model, objective, *setup.batches.begin(), options.record_step)));
}

}  // namespace fashion_mnist
