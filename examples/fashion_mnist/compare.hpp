// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <gradaccum/autocast.hpp>
#include <gradaccum/run_page.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "train.hpp"

namespace fashion_mnist {

struct Difference {
  double largest = 0;   // of any two parameters
  double relative = 0;  // L2 norm of the difference over the L2 norm of the parameters
};

inline Difference difference(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  double largest = 0, squared_difference = 0, squared_norm = 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    const auto reference = left[i].to(torch::kFloat64);
    const auto delta = reference - right[i].to(torch::kFloat64);
    largest = std::max(largest, delta.abs().max().item<double>());
    squared_difference += delta.square().sum().item<double>();
    squared_norm += reference.square().sum().item<double>();
  }
  return {largest, std::sqrt(squared_difference / squared_norm)};
}

struct NamedRun {
  std::string name;
  Options options;
  RunResult result = {};
};

/// Returns the runs of --compare: batches of B; batches of B/4 accumulated over 4 steps; batches of B compiled, if they
/// were; and batches of B in bfloat16 if that is fast, except for float64.
inline std::vector<NamedRun> runs_to_compare(const Options& large) {
  auto plain = large;
  plain.compile.clear();
  plain.report.clear();
  auto small = plain, bfloat16 = plain;
  small.batch_size = large.batch_size / compared_steps;
  small.accumulate = AccumulationSchedule(std::to_string(compared_steps));
  bfloat16.amp = "bf16";

  const auto large_name = fmt::format("{} x 1", large.batch_size);
  std::vector<NamedRun> runs{{large_name, plain}, {fmt::format("{} x {}", small.batch_size, compared_steps), small}};
  if (!large.compile.empty()) runs.push_back({large_name + " compiled", large});
  if (large.dtype != "float64" && ga::is_bf16_fast(at::Device(large.device)))
    runs.push_back({large_name + " bf16", bfloat16});
  return runs;
}

inline void print_table(const std::vector<NamedRun>& runs) {
  fmt::print("{:<16}{:>9}{:>10}{:>9}{:>16}{:>18}\n", "Run", "Accuracy", "Avg loss", "Seconds", "Samples/second",
             "Peak memory (MB)");
  for (const auto& [name, options, result] : runs)
    fmt::print("{:<16}{:>8.1f}%{:>10.6f}{:>9.1f}{:>16}{:>18.2f}\n", name, 100 * result.test["accuracy"],
               result.test["loss"], result.seconds, ga::rate_text(result.samples_per_second),
               static_cast<double>(result.peak_bytes) / 1e6);
}

/// Trains all runs; --report shows them on one page with the same axes.
inline void train_all(std::vector<NamedRun>& runs, const Dataset& dataset, const std::string& report = {}) {
  std::optional<ga::RunPage> page;
  if (!report.empty()) page.emplace(ga::RunPageOptions{.path = report, .title = "FashionMNIST"});
  RunOnPage on_page{.page = page ? &*page : nullptr};
  for (auto& run : runs) {
    fmt::print("Run {}\n\n", run.name);
    if (page) on_page.curves = &page->add_run(run.name);
    on_page.epoch = 1.0 / static_cast<double>(run.options.epochs * static_cast<std::int64_t>(runs.size()));
    run.result = train(run.options, dataset, {}, on_page);
    on_page.done += 1.0 / static_cast<double>(runs.size());
    fmt::print("\n");
  }
  if (page) page->end();
}

/// Trains several times from the same seed, and prints the results in a table.
inline void compare(const Options& options, const Dataset& dataset) {
  auto runs = runs_to_compare(options);
  // The mean of a window's means equals the mean over its samples only if its batches are equally large.
  if (const auto samples = dataset.train.images.size(0), size = runs[1].options.batch_size; samples % size != 0)
    throw std::runtime_error(
        fmt::format("--compare: a quarter of --batch-size must divide the {} training images, got {}", samples, size));

  train_all(runs, dataset, options.report);
  print_table(runs);
  const auto [largest, relative] = difference(runs[0].result.parameters(), runs[1].result.parameters());
  fmt::print(
      "\nThe final parameters of {} and {} differ by at most {:.1e}, and by {:.1e} of their norm.\n"
      "Accumulation is exact: the runs agree up to the rounding of floats, which training amplifies.\n",
      runs[0].name, runs[1].name, largest, relative);
  if (!options.compile.empty())
    fmt::print("Compiled, they differ from {} by {:.1e} of their norm.\n", runs[0].name,
               difference(runs[0].result.parameters(), runs[2].result.parameters()).relative);
  if (runs.back().options.mixed_precision())
    fmt::print("bfloat16 rounds to 8 bits, so that its run goes a way of its own.\n");
  else if (options.dtype == "float32")
    fmt::print("bfloat16 is left out: without AVX-512 it takes this processor tens of times as long.\n");
  print_resident(runs.back().result);
  if (!options.report.empty()) fmt::print("The curves of all runs: {}\n", options.report);
}

/// Compares an update of 64 images by micro-batches of 4 and of 1. The arithmetic is the same, but the time is not:
/// fill the device first, then accumulate.
inline void compare_micro_batches(const Options& options, const Dataset& dataset) {
  for (const std::int64_t size : {4, 1}) {
    auto run = options;
    run.batch_size = size;
    run.accumulate = AccumulationSchedule(std::to_string(64 / size));
    Setup setup(run, dataset);
    const auto report = measure_with_trainer(setup, run);
    fmt::print("Batch {} x {} steps\n{}\n", size, 64 / size, fmt::streamed(report));
  }
}

}  // namespace fashion_mnist
