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
  double seconds = 0;             // training and evaluation; of one that was resumed, all of them
  double samples_per_second = 0;  // training images in that time
  std::int64_t peak_bytes = 0;    // beyond the data set: parameters, gradients, optimizer state, batches, activations
  std::int64_t peak_resident_bytes = 0;  // of the process, data set and libraries included; 0 where nobody tells
  int signal = 0;                        // that ended it early
  std::shared_ptr<Setup> setup;          // what was trained

  std::vector<at::Tensor> parameters() const { return setup->model->parameters(); }
};

/// Trains a new model as the options say and prints how it goes. Both loops give the same result, bit for bit, where
/// batches are equally large. `group`: the processes that train together, each with its share of the batches.
inline RunResult train(const Options& options, const Dataset& dataset, const ga::ProcessGroup& group = {},
                       const RunOnPage& page = {}) {
  std::optional<ga::MemoryMeter> meter;          // of this scope: the data set was there before
  if (options.profile.empty()) meter.emplace();  // LibTorch's profiler needs its place
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

/// What Linux counts, beside what tensors took: no allocation of the process's is left out.
inline void print_resident(const RunResult& result) {
  fmt::print("Peak resident memory of the process: {:.0f} MB\n", static_cast<double>(result.peak_resident_bytes) / 1e6);
}

inline void print_summary(const RunResult& result) {
  fmt::print("{:.1f} seconds, {} samples/second, peak memory {:.1f} MB beyond the data set\n", result.seconds,
             ga::rate_text(result.samples_per_second), static_cast<double>(result.peak_bytes) / 1e6);
  print_resident(result);
}

}  // namespace fashion_mnist
