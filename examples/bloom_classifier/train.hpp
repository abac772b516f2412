// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/trainer.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "encoded_reviews.hpp"
#include "model_folder.hpp"
#include "objective.hpp"
#include "optimizer.hpp"
#include "options.hpp"
#include "print.hpp"
#include "watching.hpp"

/// The training itself. Read this file first.
namespace bloom {

struct EncodedSplit {
  EncodedReviews train, validation, test;
};

struct Trained {
  ga::FitReport report;
  ga::Evaluation test;
  std::int64_t tokens = 0, padded = 0;  // of training, without and with padding
  double training_seconds = 0;          // without validations
  std::int64_t peak_bytes = 0;          // of all tensors, weights included; 0 if not measured
};

/// Makes the policy that saves states, if --save is given. With --patience it keeps the best state.
inline std::optional<ga::SaveState> saving(const Options& options) {
  if (options.save.empty()) return std::nullopt;
  return ga::SaveState{.directory = options.states(),
                       .every_updates = options.save_every,
                       .on_signals = true,
                       .keep_best = options.patience > 0 ? 1 : 0};
}

/// Makes the policy for --memory-budget: it divides an update's reviews into parts that fit, and checkpoints blocks.
inline std::optional<ga::FitMemory> fitting(ModelFolder& folder, const Options& options) {
  const auto budget = static_cast<std::int64_t>(options.memory_budget);
  if (budget == 0) return std::nullopt;
  folder.model->checkpoint_blocks({.memory_budget = budget});
  return ga::FitMemory{.budget = budget, .checkpointed = {folder.model->checkpointed_blocks()}};
}

/// ga::OptimizerInBackward if --in-backward is given. It excludes DataParallel, even with one process.
struct StepInBackward {
  static constexpr std::string_view name = "step_in_backward";

  bool enabled = false;

  void attach(ga::TrainerBase& trainer) const {
    if (enabled) trainer.set_in_backward(true);
  }
};

inline ga::FitOptions fit_options(const Options& options) {
  return {.epochs = options.epochs,
          .updates = options.most_updates(),
          .time = options.most_time(),
          .resume = options.resume ? options.states() : std::string(),
          .measure_memory = options.profile.empty()};
}

/// Trains the model. `more`: further policies.
template <class... More>
Trained fit(ModelFolder& folder, const EncodedSplit& reviews, const Options& options, More... more) {
  if (options.segments > 0) folder.model->checkpoint_blocks({.segments = options.segments});
  const auto steps = options.memory_budget > 0 ? 1 : options.accumulate;
  folder.model->transformer->sparse_embedding_gradient(options.steps_by_rows());
  auto optimizer = make_optimizer(options.optimizer, folder.model->parameters(), options.learning_rate, options.seed);
  auto batches = reviews.train.training_batches(options.micro_batch * options.accumulate / steps, folder.padding(),
                                                options.seed, options.length_multiple(), options.group);
  const auto scored = [&](const EncodedReviews& some, const ga::ProcessGroup& group) {
    return some.test_batches(4 * options.max_length, folder.padding(), options.length_multiple(), group);
  };
  auto validation = scored(reviews.validation, options.group), test = scored(reviews.test, {});
  if (options.length_multiple() > 1) fmt::print("In an epoch: {}\n", fmt::streamed(batches.summary()));

  Trained trained;
  std::int64_t tokens = 0, padded = 0;  // of the current batch
  auto learned = training_objective(folder.model, options);
  const auto counted = [&](auto& model, auto& batch) {
    tokens = batch.tokens;
    padded = options.compile.empty() && is_packed(batch) ? batch.tokens : batch.data.numel();
    return learned(model, batch);
  };
  ga::Trainer trainer(
      folder.model, optimizer, counted, profile(options), ga::Accumulate{.steps = steps}, fitting(folder, options),
      StepInBackward{.enabled = options.in_backward},
      ga::MixedPrecision{.dtype = options.autocast_type(), .enabled = options.mixed_precision()},
      ga::DataParallel{.group = options.group, .shard = options.shard}, ga::Progress{},
      Tokens{.real = &tokens, .padded = &padded},
      ga::Validate(validation, {.every_updates = options.validate_every_updates(), .every_epochs = 1}, ga::Accuracy{}),
      Lines{.every = options.log_every, .group = options.group}, stopping_early(options), tensorboard(options),
      report(options), std::move(more)..., saving(options));
  trained.report = trainer.fit(batches, fit_options(options));
  print_profile(trainer);
  print_steps(learned);
  if (options.memory_budget > 0) fmt::print("{}", fmt::streamed(trainer.template policy<ga::FitMemory>().plan()));
  if (trained.report.signal != 0) return trained;
  trained.tokens = trainer.template policy<Tokens>().all_real;
  trained.padded = trainer.template policy<Tokens>().all_padded;
  trained.training_seconds = trained.report.seconds;
  for (auto& validation : trained.report.validations) trained.training_seconds -= validation.found.seconds;
  for (auto* count : {&trained.tokens, &trained.padded}) *count = sum(options.group, *count);
  trained.test = trainer.evaluate(test, ga::Accuracy{});
  return trained;
}

}  // namespace bloom
