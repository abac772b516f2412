// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "with_trainer.hpp"

/// Trains several times from the same seed, and prints a table. A program of your own needs none of this.
namespace fashion_mnist {

struct Run {
  std::string name;
  Options options;
  ga::FitReport report = {};
  at::Tensor parameters = {};
};

/// Returns the runs of --compare: batches of B; batches of B/4 accumulated over 4 steps; and batches of B compiled,
/// with checkpoints and within a budget, if these options are given, and in bfloat16 if that is fast, except for
/// float64.
inline std::vector<Run> runs_to_compare(const Options& given) {
  auto plain = given;
  plain.compile = plain.report = "";
  plain.checkpoint = plain.memory_budget = 0;
  plain.graphs = given.checkpoint + given.memory_budget == 0;  // their memory is not counted
  const auto name = fmt::format("{} x 1", plain.batch_size);
  std::vector<Run> runs{{name, plain}};
  const auto add = [&](const std::string& of, const auto& change) {
    change(runs.emplace_back(Run{of, plain}).options);
  };
  add(fmt::format("{} x {}", plain.batch_size / compared_steps, compared_steps), [](Options& options) {
    options.batch_size /= compared_steps;
    options.accumulate = {{0, compared_steps}};
  });
  if (!given.compile.empty()) add(name + " compiled", [&](Options& options) { options.compile = given.compile; });
  if (given.checkpoint > 0)
    add(name + " checkpointed", [&](Options& options) { options.checkpoint = given.checkpoint; });
  if (given.memory_budget > 0)
    add(name + " in budget", [&](Options& options) { options.memory_budget = given.memory_budget; });
  if (given.dtype != "float64" && ga::is_bf16_fast(at::Device(given.device)))
    add(name + " bf16", [](Options& options) { options.amp = "bf16"; });
  return runs;
}

/// A policy: draws the curves of one run on a page that shows several.
struct OnPage {
  ga::RunPage* page;
  ga::Curves* curves;

  void after_step(const ga::Step& step) const { curves->add("train/loss", step.update, step.loss.item<double>()); }
  void on_validation(const ga::Validation& validation) const {
    for (const auto& [name, value] : validation.found.metrics) curves->add("test/" + name, validation.update, value);
    page->update();
  }
};

inline double megabytes(const ga::FitReport& report) {
  std::int64_t bytes = 0;
  for (const auto& [device, peak] : report.peak_bytes) bytes = std::max(bytes, peak);
  return static_cast<double>(bytes) / 1e6;
}

inline void print_table(const std::vector<Run>& runs) {
  fmt::print("{:<22}{:>9}{:>10}{:>9}{:>16}{:>18}{:>12}\n", "Run", "Accuracy", "Avg loss", "Seconds", "Samples/second",
             "Peak memory (MB)", "Difference");
  const auto& first = runs[0].parameters;
  for (const auto& run : runs) {
    const auto& test = run.report.validations.back().found;
    fmt::print("{:<22}{:>8.1f}%{:>10.6f}{:>9.1f}{:>16}{:>18.2f}{:>12.1e}\n", run.name, 100 * test["accuracy"],
               test["loss"], run.report.seconds, ga::rate_text(run.report.samples_per_second), megabytes(run.report),
               ((run.parameters - first).norm() / first.norm()).item<double>());
  }
  fmt::print(
      "\nDifference: of the final parameters from those of the first run, relative to their norm. Accumulation is "
      "exact;\nfloats round differently, and training amplifies that.\n");
}

inline void compare(const Options& options, const Dataset& dataset) {
  auto runs = runs_to_compare(options);
  std::optional<ga::RunPage> page;
  if (!options.report.empty()) page.emplace(ga::RunPageOptions{.path = options.report, .title = "FashionMNIST"});
  for (auto& run : runs) {
    fmt::print("Run {}\n\n", run.name);
    Setup setup(run.options, dataset);
    std::optional<OnPage> on_page;
    if (page) on_page = OnPage{&*page, &page->add_run(run.name)};
    run.report = train_with_trainer(setup, run.options, on_page);
    run.parameters = torch::nn::utils::parameters_to_vector(setup.model->parameters()).detach().to(torch::kFloat64);
  }
  print_table(runs);
  if (!page) return;
  page->end();
  fmt::print("The curves of all runs: {}\n", options.report);
}

/// Compares an update of 64 images by micro-batches of 4 and of 1. The arithmetic is the same, but the time is not:
/// fill the device first, then accumulate.
inline void compare_micro_batches(const Options& options, const Dataset& dataset) {
  for (const std::int64_t size : {4, 1}) {
    auto run = options;
    run.batch_size = size;
    Setup setup(run, dataset);
    ga::Trainer trainer(setup.model, setup.optimizer, objective, ga::Accumulate{.steps = 64 / size}, ga::Progress{});
    const auto report = trainer.fit(setup.batches, {.epochs = options.epochs, .measure_memory = true});
    fmt::print("Batch {} x {} steps\n{}\n", size, 64 / size, fmt::streamed(report));
  }
}

}  // namespace fashion_mnist
