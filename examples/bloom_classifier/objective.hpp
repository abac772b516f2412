// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/graphed_step.hpp>
#include <map>
#include <utility>
#include <vector>

#include "encoded_reviews.hpp"
#include "model_folder.hpp"
#include "options.hpp"

/// The objective, and the compiled or captured steps that replace it.
namespace bloom {

/// Returns a batch's mean loss, its number of reviews, and the scores for metrics.
inline ga::Loss loss_of(at::Tensor scores, const ga::data::SequenceBatch& batch) {
  scores = scores.to(at::promote_types(scores.scalar_type(), torch::kFloat));  // 16 bits are too few for a loss
  return ga::Loss{torch::cross_entropy_loss(scores, batch.target), batch.rows()}.with(scores, batch.target);
}

/// Computes the padding, too, so that there are few shapes for compiled steps and GPUs. Padding is at the end of a row,
/// where the model recognizes it by its id, so no mask is copied to the device.
inline ga::Loss padded_objective(BloomForSequenceClassification& model, const ga::data::SequenceBatch& batch) {
  return loss_of(model->forward(batch.data), batch);
}

/// Rows are packed on a CPU, where a few hundred tokens already reach full speed: only their tokens are computed.
inline bool is_packed(const ga::data::SequenceBatch& batch) {
  return batch.data.is_cpu() && batch.tokens < batch.data.numel();
}

inline ga::Loss objective(BloomForSequenceClassification& model, const ga::data::SequenceBatch& batch) {
  if (!is_packed(batch)) return padded_objective(model, batch);
  const auto is_token = torch::arange(batch.data.size(1)) < batch.lengths.unsqueeze(1);
  return loss_of(model->forward_packed(batch.data.masked_select(is_token), batch.lengths), batch);
}

using Objective = std::function<ga::Loss(BloomForSequenceClassification&, const ga::data::SequenceBatch&)>;
using CompiledObjective = ga::CompiledStep<BloomForSequenceClassification, decltype(&padded_objective)>;
using GraphedObjective = ga::GraphedStep<BloomForSequenceClassification, decltype(&padded_objective)>;

/// Returns the objective, the step that --compile names, or the step's graphs on a GPU.
inline Objective training_objective(BloomForSequenceClassification& model, const Options& options) {
  if (!options.compile.empty()) return CompiledObjective(model, &padded_objective, options.compile);
  if (options.replays_graphs()) return GraphedObjective(model, &padded_objective);
  return objective;
}

inline void print_steps(const Objective& learned) {
  if (const auto* const step = learned.target<CompiledObjective>()) fmt::print("{}", fmt::streamed(step->report()));
  if (const auto* const step = learned.target<GraphedObjective>()) fmt::print("{}", fmt::streamed(step->report()));
}

/// Returns one batch of each of the most frequent shapes.
inline std::vector<ga::data::SequenceBatch> frequent_batches(ga::data::LengthBuckets batches, std::size_t most) {
  std::map<std::vector<std::int64_t>, std::pair<std::int64_t, ga::data::SequenceBatch>> by_shape;
  for (const auto& batch : batches) {
    auto& [count, first] = by_shape[batch.data.sizes().vec()];
    if (count++ == 0) first = batch;
  }
  std::vector<std::pair<std::int64_t, ga::data::SequenceBatch>> all;
  for (auto& [shape, counted] : by_shape) all.push_back(counted);
  std::ranges::stable_sort(all, [](auto& a, auto& b) { return a.first > b.first; });
  std::vector<ga::data::SequenceBatch> frequent;
  for (std::size_t i = 0; i < std::min(all.size(), most); ++i) frequent.push_back(all[i].second);
  return frequent;
}

/// Records the training step of these options for gradaccum-compile-step: for six lengths on a CPU, and for sixteen on a
/// device, which waits for the host in eager steps.
inline void record_step(ModelFolder& folder, const EncodedReviews& reviews, const Options& options) {
  const auto batches = frequent_batches(
      reviews.training_batches(options.micro_batch, folder.padding(), options.seed, options.length_multiple()),
      options.on_cpu() ? 6 : 16);
  const ga::Autocast autocast(options.device, options.autocast_type(), options.mixed_precision());
  folder.model->train();
  fmt::print("{}",
             fmt::streamed(ga::save_steps(folder.model, padded_objective, batches, options.record_step,
                                          {.any_rows = false, .constants = true})));  // ALiBi's channels are constant
}

}  // namespace bloom
