// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/trainer.hpp>
#include <optional>

#include "objective.hpp"
#include "print.hpp"
#include "setup.hpp"

/// The second of two starting points: the Trainer, and a policy of one's own.
namespace fashion_mnist {

/// A policy: prints the heading of an epoch, and after it how well the model does on the test images.
struct TestResults {
  ga::data::TensorBatches* images = nullptr;
  std::function<ga::Evaluation()> evaluate = {};
  ga::Evaluation last = {};

  void attach(auto& trainer) {
    evaluate = [this, &trainer] { return trainer.evaluate(*images, ga::Accuracy{}); };
  }
  void on_epoch_begin(std::int64_t epoch) { print_heading(epoch); }
  void on_epoch_end(std::int64_t) { print_results(last = evaluate()); }
};

struct Trained {
  ga::Evaluation test;
  ga::FitReport report;
};

/// A policy, where --save names a directory.
inline std::optional<ga::SaveState> saving(const Options& options) {
  if (options.save.empty()) return std::nullopt;
  return ga::SaveState{.directory = options.save,
                       .every_updates = options.save_every,
                       .keep_last = options.keep_last,
                       .on_signals = true};
}

/// Goes on from a state where --resume says so.
inline Trained train_with_trainer(Setup& setup, const Options& options) {
  const auto learned = training_objective(setup, options);
  ga::Trainer trainer(setup.model, setup.optimizer, learned, ga::Accumulate{.schedule = options.accumulate.by_epoch()},
                      ga::MixedPrecision{.dtype = options.autocast_type(), .enabled = options.mixed_precision()},
                      ga::DataParallel{.group = setup.group}, ga::Progress{}, TestResults{&setup.test_batches},
                      saving(options));
  const auto report =
      trainer.fit(setup.batches, {.epochs = options.epochs, .resume = options.resume ? options.save : ""});
  auto& test = trainer.policy<TestResults>();
  if (test.last.metrics.empty() && report.signal == 0) {
    fmt::print("{} has all {} epochs\n", report.resumed_from, report.epochs);
    test.on_epoch_end(report.epochs - 1);
  }
  print_compiled(learned);
  return {test.last, report};
}

/// Trains without looking at the test images, and tells time and memory.
inline ga::FitReport measure_with_trainer(Setup& setup, const Options& options) {
  ga::Trainer trainer(setup.model, setup.optimizer, objective,
                      ga::Accumulate{.schedule = options.accumulate.by_epoch()}, ga::Progress{});
  return trainer.fit(setup.batches, {.epochs = options.epochs, .measure_memory = true});
}

}  // namespace fashion_mnist
