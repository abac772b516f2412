// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <gradaccum/linear_cross_entropy.hpp>
#include <gradaccum/trainer.hpp>

#include "train.hpp"

/// Pre-training: --task causal-lm learns to predict each next word of the texts, whose labels it does not use.
namespace bloom {

/// Returns the mean loss of the batch's next words. Logits of all words are never made, since BLOOM has 250,880.
inline ga::Loss next_word_objective(BloomForSequenceClassification& model, const ga::data::SequenceBatch& batch) {
  const auto hidden = model->transformer->all_tokens(batch.data);
  const auto next = batch.data.slice(1, 1);
  const auto position = torch::arange(next.size(1)), last = batch.lengths.unsqueeze(1) - 1;
  const auto target = next.masked_fill((position >= last).to(next.device()), -100);  // padding
  return ga::linear_cross_entropy(hidden.slice(1, 0, -1), model->transformer->word_embeddings->weight, target,
                                  {.items = static_cast<double>(batch.tokens - batch.rows())});
}

/// A policy: prints the perplexity of the validation texts.
struct Perplexity {
  void on_validation(const ga::Validation& validation) const {
    fmt::print("Update {} | Val perplexity: {:.2f}\n", validation.update, std::exp(validation.found["loss"]));
  }
};

/// Trains the transformer, whose table of words is also its last layer. The classification head stays as it is.
inline Trained fit_language_model(ModelFolder& folder, const EncodedSplit& texts, const Options& options) {
  if (options.segments > 0) folder.model->checkpoint_blocks({.segments = options.segments});
  auto optimizer =
      make_optimizer(options.optimizer, folder.model->transformer->parameters(), options.learning_rate, options.seed);
  auto batches = texts.train.training_batches(options.micro_batch, folder.padding(), options.seed,
                                              options.length_multiple(), options.group);
  auto validation = texts.validation.test_batches(options.max_length, folder.padding(), 1, options.group);
  auto test = texts.test.test_batches(options.max_length, folder.padding());
  ga::Trainer trainer(folder.model, optimizer, next_word_objective, ga::Accumulate{.steps = options.accumulate},
                      ga::MixedPrecision{.dtype = options.autocast_type(), .enabled = options.mixed_precision()},
                      ga::DataParallel{.group = options.group, .shard = options.shard}, ga::Progress{},
                      ga::Validate(validation, {.every_updates = options.validate_every_updates(), .every_epochs = 1}),
                      Perplexity{}, stopping_early(options), tensorboard(options), report(options), saving(options));
  fmt::print("Perplexity before: {:.2f}\n", std::exp(trainer.evaluate(test)["loss"]));
  Trained trained;
  auto settings = fit_options(options);
  settings.unit = "tokens";
  settings.count_flops = true;
  trained.report = trainer.fit(batches, settings);
  if (trained.report.signal == 0) trained.test = trainer.evaluate(test);
  return trained;
}

}  // namespace bloom
