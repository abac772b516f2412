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

/// The objective, and the steps that are compiled or captured in its place.
namespace bloom {

/// The mean loss of a batch, how many reviews it is the mean of, and what metrics look at.
inline ga::Loss loss_of(at::Tensor scores, const ga::data::SequenceBatch& batch) {
  scores = scores.to(at::promote_types(scores.scalar_type(), torch::kFloat));  // 16 bits are too few for a loss
  return ga::Loss{torch::cross_entropy_loss(scores, batch.target), batch.rows()}.with(scores, batch.target);
}

/// Computes the padding, too, so that shapes are few, as compiled steps and GPUs want them. It stands at the end, where
/// the model knows it by its id: no mask has to be copied to a device.
inline ga::Loss padded_objective(BloomForSequenceClassification& model, const ga::data::SequenceBatch& batch) {
  return loss_of(model->forward(batch.data), batch);
}

/// On a CPU, which a few hundred tokens keep at its rate, rows are packed: their tokens alone are computed.
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

/// The objective, what --compile made of it, or its graphs on a GPU.
inline Objective training_objective(BloomForSequenceClassification& model, const Options& options) {
  if (!options.compile.empty()) return CompiledObjective(model, &padded_objective, options.compile);
  if (options.replays_graphs()) return GraphedObjective(model, &padded_objective);
  return objective;
}

inline void print_steps(const Objective& learned) {
  if (const auto* const step = learned.target<CompiledObjective>()) fmt::print("{}", fmt::streamed(step->report()));
  if (const auto* const step = learned.target<GraphedObjective>()) fmt::print("{}", fmt::streamed(step->report()));
}

/// A batch of each shape, those that most batches have: others can stay as they are.
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

/// Records the step that the options would train with, for tools/compile_step.py: six lengths of it, and on a device,
/// which eager steps leave idle, sixteen.
inline void record_step(ModelFolder& folder, const EncodedReviews& reviews, const Options& options) {
  const auto batches = frequent_batches(
      reviews.training_batches(options.micro_batch, folder.padding(), options.seed, options.length_multiple()),
      options.on_cpu() ? 6 : 16);
  const ga::Autocast autocast(options.device, options.autocast_type(), options.mixed_precision());
  folder.model->train();
  fmt::print("{}",
             fmt::streamed(ga::save_steps(folder.model, padded_objective, batches, options.record_step,
                                          {.any_rows = false, .constants = true})));  // ALiBi is one, of positions
}

}  // namespace bloom
