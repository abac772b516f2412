// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <optional>
#include <utility>

#include "model.hpp"

/// The second of two starting points: the Trainer with a custom policy.
namespace fashion_mnist {

/// A policy: prints a heading for each epoch, and the results on the test images.
struct Lines {
  void on_epoch_begin(std::int64_t epoch) const { print_heading(epoch); }
  void on_validation(const ga::Validation& validation) const { print_results(validation.found); }
};

/// Returns the policy if its option is given. A Trainer ignores an empty one.
template <class Policy>
std::optional<Policy> if_given(bool given, Policy policy) {
  return given ? std::optional(std::move(policy)) : std::nullopt;
}

/// Trains with the Trainer; resumes from a state with --resume. `more` are further policies.
inline ga::FitReport train_with_trainer(Setup& setup, const Options& options, auto... more) {
  const auto learned = training_objective(setup, options);
  const auto title = fmt::format("FashionMNIST, {} images a batch, {}", options.batch_size, options.optimizer);
  ga::Trainer trainer(
      setup.model, setup.optimizer, learned, ga::Accumulate{.schedule = options.accumulate},
      ga::MixedPrecision{.dtype = options.autocast_type(), .enabled = options.mixed_precision()},
      ga::DataParallel{.group = setup.group, .shard = options.shard}, ga::Progress{},
      ga::Validate(setup.test_share, {.every_epochs = 1}, ga::Accuracy{}), Lines{},
      if_given(options.memory_budget > 0, ga::FitMemory{.budget = options.memory_budget}),
      if_given(!options.profile.empty(), ga::Profile{.updates = {10, 13}, .directory = options.profile}),
      if_given(!options.tensorboard.empty(), ga::TensorBoard{.directory = options.tensorboard}),
      if_given(!options.report.empty(), ga::Report{.path = options.report, .title = title}),
      if_given(!options.save.empty(),
               ga::SaveState{.directory = options.save, .every_updates = options.save_every, .on_signals = true}),
      std::move(more)...);
  const auto report = trainer.fit(
      setup.batches,
      {.epochs = options.epochs, .resume = options.resume ? options.save : "", .measure_memory = options.compare});
  if (const auto* const profile = trainer.template find_policy<ga::Profile>(); profile && profile->report())
    fmt::print("{}", fmt::streamed(*profile->report()));
  if (const auto* const memory = trainer.template find_policy<ga::FitMemory>())
    fmt::print("{}\n", fmt::streamed(memory->plan()));
  print_steps(learned);
  return report;
}

/// Trains a new model and prints the report. Returns the program's exit status.
inline int run_with_trainer(const Options& options, const Dataset& dataset, const ga::ProcessGroup& group) {
  Setup setup(options, dataset, group);
  const auto report = train_with_trainer(setup, options);
  if (report.signal != 0) {
    fmt::print("Stopped by {}, and saved in {}: --resume continues\n", report.signal == SIGINT ? "SIGINT" : "SIGTERM",
               options.save);
    return 128 + report.signal;
  }
  fmt::print("Done\n{}", fmt::streamed(report));
  return 0;
}

}  // namespace fashion_mnist
