// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <gradaccum/memory_meter.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "compare.hpp"

namespace fashion_mnist {

/// Compares bits, so that NaN equals NaN.
inline bool same_bits(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  return std::ranges::equal(left, right, [](const at::Tensor& one, const at::Tensor& other) {
    return at::equal(one.detach().view(torch::kUInt8), other.detach().view(torch::kUInt8));
  });
}

/// The cost of forward and backward alone.
struct PassCost {
  double seconds = 0;
  std::int64_t samples = 0;
  std::int64_t peak_bytes = 0;  // activations and temporary gradients

  void add(const NamedRun& run, const ga::data::Batch& batch) {
    const auto start = std::chrono::steady_clock::now();
    ga::MemoryMeter meter;
    forward(objective, run.result.setup->model, batch, run.options).backward();
    if (batch.data.is_cuda()) torch::cuda::synchronize();
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    samples += batch.data.size(0);
    peak_bytes = std::max(peak_bytes, meter.peak_bytes());
  }
};

/// Measures each run on the training images once more, alternating batch by batch: initialization is over for both, and
/// a slowdown of the machine affects both.
inline std::vector<PassCost> measure_passes(const std::vector<NamedRun>& runs) {
  for (const auto& run : runs) {
    run.result.setup->model->train();                // the plan is for training
    for (auto& parameter : run.result.parameters())  // allocated gradients are not part of the peak
      parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  std::vector<PassCost> costs(runs.size());
  for (const auto& batch : runs[0].result.setup->batches)
    for (std::size_t i = 0; i < runs.size(); ++i) costs[i].add(runs[i], batch);
  return costs;
}

/// Formats `27 % less` or `6 % more`.
inline std::string change(double from, double to) {
  const auto percent = 100 * (to / from - 1);
  return fmt::format("{:.0f} % {}", std::abs(percent), percent > 0 ? "more" : "less");
}

inline void print_costs(const std::vector<NamedRun>& runs, const std::vector<PassCost>& costs) {
  fmt::print("{:<14}{:>10}{:>18}{:>18}{:>16}\n", "Run", "Avg loss", "Peak memory (MB)", "Activations (MB)",
             "Samples/second");
  for (std::size_t i = 0; i < runs.size(); ++i)
    fmt::print("{:<14}{:>10.6f}{:>18.2f}{:>18.2f}{:>16}\n", runs[i].name, runs[i].result.test["loss"],
               static_cast<double>(runs[i].result.peak_bytes) / 1e6, static_cast<double>(costs[i].peak_bytes) / 1e6,
               ga::rate_text(static_cast<double>(costs[i].samples) / costs[i].seconds));
}

inline void print_changes(const std::vector<NamedRun>& runs, const std::vector<PassCost>& costs) {
  const auto bytes = [](auto& what) { return static_cast<double>(what.peak_bytes); };
  fmt::print(
      "\n{} memory (activations alone: {}), {} time for forward and backward.\n"
      "The parameters of both are the same, to the bit.\n\n",
      change(bytes(runs[0].result), bytes(runs[1].result)), change(bytes(costs[0]), bytes(costs[1])),
      change(costs[0].seconds, costs[1].seconds));
}

/// Trains with all activations kept, and then with some of them recomputed in backward: less memory, more time, the
/// same parameters.
inline void compare_checkpoint(const Options& options, const Dataset& dataset) {
  std::vector<NamedRun> runs{{"plain", options}, {"checkpointed", options}};
  runs[0].options.checkpoint.reset();
  if (options.checkpoint->memory_budget > 0)
    fmt::print(
        "The first batch of the checkpointed run measures bytes and time of each module, to plan the budget\n\n");
  train_all(runs, dataset);
  if (!same_bits(runs[0].result.parameters(), runs[1].result.parameters()))
    throw std::runtime_error("--checkpoint: the parameters must be those of the plain run, to the bit, and are not");

  fmt::print("Both once more, batch by batch in turns, for the time\n\n");
  std::fflush(stdout);
  const auto costs = measure_passes(runs);
  print_costs(runs, costs);
  print_changes(runs, costs);
  fmt::print("{}", fmt::streamed(runs[1].result.setup->model->plan()));
}

}  // namespace fashion_mnist
