// SPDX-License-Identifier: Apache-2.0
//
// Trains a small network on FashionMNIST with gradient accumulation. Read train.hpp first: the rest is around it.

#include <fmt/format.h>
#include <torch/torch.h>

#include <exception>
#include <gradaccum/keep_freed_memory.hpp>

#include "compare.hpp"
#include "compare_checkpoint.hpp"
#include "dataset.hpp"
#include "options.hpp"
#include "train.hpp"

namespace {

/// Gives the program's status.
int run(const fashion_mnist::Options& options) {
  if (options.threads > 0) torch::set_num_threads(options.threads);
  const auto dataset = fashion_mnist::load_dataset(options.data, options.device, options.scalar_type());
  if (options.compare) {
    fashion_mnist::compare(options, dataset);
  } else if (options.compare_micro_batches) {
    fashion_mnist::compare_micro_batches(options, dataset);
  } else if (options.checkpoint) {
    fashion_mnist::compare_checkpoint(options, dataset);
  } else {
    const auto result = fashion_mnist::train(options, dataset);
    if (result.signal != 0) return 128 + result.signal;
    fashion_mnist::print_summary(result);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gradaccum::keep_freed_memory();  // a third of the time of a small model, on glibc
  const auto options = fashion_mnist::parse_options(argc, argv);
  try {
    return run(options);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "fashion_mnist: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "fashion_mnist: {}\n", error.what());
  }
  return 1;
}
