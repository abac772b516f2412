// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
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

inline RunResult train_named(const std::string& name, const Options& options, const Dataset& dataset) {
  fmt::print("Run {}\n\n", name);
  const auto result = train(options, dataset);
  fmt::print("\n");
  return result;
}

inline void print_row(const std::string& name, const RunResult& result) {
  fmt::print("{:<12}{:>8.1f}%{:>10.6f}{:>9.1f}{:>16.0f}{:>18.2f}\n", name, 100 * result.test.accuracy, result.test.loss,
             result.seconds, result.samples_per_second, static_cast<double>(result.peak_bytes) / 1e6);
}

/// Trains twice from the same seed: with batches of B, and with batches of B/4 that are accumulated over 4 steps.
inline void compare(const Options& options, const Dataset& dataset) {
  auto small = options;
  small.batch_size = options.batch_size / compared_steps;
  small.accumulate = AccumulationSchedule(std::to_string(compared_steps));
  // The mean of a window's means is the mean over its samples only where its batches are equally large.
  if (const auto samples = dataset.train.images.size(0); samples % small.batch_size != 0)
    throw std::runtime_error(fmt::format(
        "--compare: a quarter of --batch-size must divide the {} training images, got {}", samples, small.batch_size));

  const auto large_name = fmt::format("{} x 1", options.batch_size);
  const auto small_name = fmt::format("{} x {}", small.batch_size, compared_steps);
  const auto large_result = train_named(large_name, options, dataset);
  const auto small_result = train_named(small_name, small, dataset);

  fmt::print("{:<12}{:>9}{:>10}{:>9}{:>16}{:>18}\n", "Run", "Accuracy", "Avg loss", "Seconds", "Samples/second",
             "Peak memory (MB)");
  print_row(large_name, large_result);
  print_row(small_name, small_result);
  const auto [largest, relative] = difference(large_result.parameters, small_result.parameters);
  fmt::print(
      "\nThe final parameters differ by at most {:.1e}, and by {:.1e} of their norm.\n"
      "Accumulation is exact: the runs agree up to the rounding of floats, which training amplifies.\n",
      largest, relative);
}

}  // namespace fashion_mnist
