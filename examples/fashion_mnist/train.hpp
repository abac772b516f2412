// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "own_loop.hpp"
#include "with_trainer.hpp"

namespace fashion_mnist {

struct RunResult {
  ga::Evaluation test;
  double seconds = 0;             // of training and evaluation, also before a resume
  double samples_per_second = 0;  // training images in that time
  std::int64_t peak_bytes = 0;    // beyond the data set: parameters, gradients, optimizer state, batches, activations
  std::int64_t peak_resident_bytes = 0;  // of the process, data set and libraries included; 0: unknown
  int signal = 0;                        // the signal that stopped it early
  std::shared_ptr<Setup> setup;          // the trained model, and its data

  std::vector<at::Tensor> parameters() const { return setup->model->parameters(); }
};

/// Trains a new model and prints its progress. Both loops give the same result, bit for bit, if batches are equally
/// large. `group`: the ranks that train together, each with its share of the batches.
inline RunResult train(const Options& options, const Dataset& dataset, const ga::ProcessGroup& group = {},
                       const RunOnPage& page = {}) {
  std::optional<ga::MemoryMeter> meter;          // excludes the data set, which exists already
  if (options.profile.empty()) meter.emplace();  // not with LibTorch's profiler, which uses the same hook
  RunResult result;
  result.setup = std::make_shared<Setup>(options, dataset, group);
  auto& setup = *result.setup;
  if (options.trainer) {
    const auto [test, report] = train_with_trainer(setup, options, page);
    result.test = test;
    result.seconds = report.seconds;
    result.samples_per_second = report.samples_per_second;
    result.signal = report.signal;
  } else {
    const auto start = std::chrono::steady_clock::now();
    result.test = train_by_hand(setup, options, page);
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    result.samples_per_second = static_cast<double>(options.epochs * setup.batches.rows()) / result.seconds;
  }
  result.peak_bytes = meter ? meter->peak_bytes() : 0;
  result.peak_resident_bytes = ga::peak_resident_memory().value_or(0);
  if (result.signal == 0)
    fmt::print("Done\n");
  else
    print_stopped(result.signal, options.save);
  return result;
}

/// Prints Linux's count, which includes all allocations of the process, unlike the count of tensors.
inline void print_resident(const RunResult& result) {
  fmt::print("Peak resident memory of the process: {:.0f} MB\n", static_cast<double>(result.peak_resident_bytes) / 1e6);
}

inline void print_summary(const RunResult& result) {
  fmt::print("{:.1f} seconds, {} samples/second, peak memory {:.1f} MB beyond the data set\n", result.seconds,
             ga::rate_text(result.samples_per_second), static_cast<double>(result.peak_bytes) / 1e6);
  print_resident(result);
}

}  // namespace fashion_mnist
