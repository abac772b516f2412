// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <gradaccum/metrics.hpp>
#include <string>

namespace fashion_mnist {

inline void print_heading(std::int64_t epoch) {
  fmt::print("Epoch {}\n-------------------------------\n", epoch + 1);
  std::fflush(stdout);  // show lines immediately, also in a file
}

inline void print_stopped(int signal, const std::string& directory) {
  fmt::print("Stopped by {} and saved in {}: with --resume the training goes on from there\n",
             signal == SIGINT ? "SIGINT" : "SIGTERM", directory);
}

inline void print_results(const gradaccum::Evaluation& test) {
  fmt::print("Test Results:\n Accuracy: {:.1f}%, Avg loss: {:.6f}\n\n", 100 * test["accuracy"], test["loss"]);
  std::fflush(stdout);
}

}  // namespace fashion_mnist
