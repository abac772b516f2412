// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/trainer.hpp>
#include <optional>

#include "objective.hpp"
#include "print.hpp"
#include "run_on_page.hpp"
#include "setup.hpp"
#include "watching.hpp"

/// The second of two starting points: the Trainer with a custom policy.
namespace fashion_mnist {

/// A policy: prints a heading for each epoch, and the results on the test images.
struct Lines {
  bool had_results = false;

  void on_epoch_begin(std::int64_t epoch) const { print_heading(epoch); }
  void on_validation(const ga::Validation& validation) {
    print_results(validation.found);
    had_results = true;
  }
};

struct Trained {
  ga::Evaluation test;
  ga::FitReport report;
};

/// Makes the policy that saves states, if --save is given. With --patience it keeps the best state.
inline std::optional<ga::SaveState> saving(const Options& options) {
  if (options.save.empty()) return std::nullopt;
  return ga::SaveState{.directory = options.save,
                       .every_updates = options.save_every,
                       .keep_last = options.keep_last,
                       .on_signals = true,
                       .keep_best = options.patience > 0 ? 1 : 0};
}

/// Trains with the Trainer; resumes from a state with --resume.
inline Trained train_with_trainer(Setup& setup, const Options& options, const RunOnPage& page = {}) {
  const auto learned = training_objective(setup, options);
  ga::Trainer trainer(
      setup.model, setup.optimizer, learned, profile(options),
      ga::Accumulate{.schedule = options.accumulate.by_epoch()},
      ga::MixedPrecision{.dtype = options.autocast_type(), .enabled = options.mixed_precision()},
      ga::DataParallel{.group = setup.group, .shard = options.shard}, ga::Progress{},
      ga::Validate(setup.test_share, {.every_updates = options.validate_every_updates(), .every_epochs = 1},
                   ga::Accuracy{}),
      Lines{}, stopping_early(options), tensorboard(options), report(options), page, saving(options));
  const auto report =
      trainer.fit(setup.batches, {.epochs = options.epochs, .resume = options.resume ? options.save : ""});
  print_profile(trainer);
  print_steps(learned);
  const auto last = report.validations.empty() ? ga::Evaluation() : report.validations.back().found;
  if (!trainer.policy<Lines>().had_results && !report.validations.empty() && report.signal == 0) {
    fmt::print("{} has all {} epochs\n", report.resumed_from, report.epochs);
    print_results(last);
  }
  return {last, report};
}

/// Trains without evaluation, and returns time and memory.
inline ga::FitReport measure_with_trainer(Setup& setup, const Options& options) {
  ga::Trainer trainer(setup.model, setup.optimizer, objective,
                      ga::Accumulate{.schedule = options.accumulate.by_epoch()}, ga::Progress{});
  return trainer.fit(setup.batches, {.epochs = options.epochs, .measure_memory = true});
}

}  // namespace fashion_mnist
