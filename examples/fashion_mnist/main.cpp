// SPDX-License-Identifier: Apache-2.0
//
// Trains a small network on FashionMNIST with gradient accumulation. Start reading in train.hpp.

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/process_group.hpp>
#include <stdexcept>

#include "compare.hpp"
#include "compare_checkpoint.hpp"
#include "compare_memory.hpp"
#include "dataset.hpp"
#include "options.hpp"
#include "train.hpp"

#ifdef MKL_ON_AMD  // CMake's option
#include <gradaccum/mkl_on_amd.hpp>
#endif

namespace {

/// Prints whether MKL's fast code is enabled on an AMD processor, which changes the measured times.
void print_mkl() {
#ifdef MKL_ON_AMD
  if (gradaccum::mkl_on_amd())
    fmt::print("MKL has its fast code on this AMD processor; without: GRADACCUM_MKL_ON_AMD=0\n");
#endif
}

/// Joins the other ranks, if there are any. Rank 0 prints and saves, and each rank uses its own GPU.
gradaccum::ProcessGroup join_others(fashion_mnist::Options& options) {
  const auto group = gradaccum::ProcessGroup::from_environment();
  if (group.world_size() == 1) return group;
  if (options.compare || options.compare_micro_batches || options.checkpoint || options.memory_budget > 0)
    throw std::invalid_argument(
        "--compare, --compare-micro-batches, --checkpoint and --memory-budget are for one process");
  if (options.device == "cuda") options.device = group.device().str();
  if (group.rank() != 0 && std::freopen("/dev/null", "w", stdout) == nullptr) throw std::runtime_error("no /dev/null");
  return group;
}

/// Returns the program's exit status.
int run(fashion_mnist::Options options) {
  const auto group = join_others(options);
  if (options.threads > 0) torch::set_num_threads(options.threads);
  const auto dataset = fashion_mnist::load_dataset(options.data, options.device, options.scalar_type());
  if (!options.record_step.empty()) {
    fashion_mnist::record_step(options, dataset);
  } else if (options.compare) {
    fashion_mnist::compare(options, dataset);
    print_mkl();
  } else if (options.compare_micro_batches) {
    fashion_mnist::compare_micro_batches(options, dataset);
  } else if (options.memory_budget > 0) {
    fashion_mnist::compare_memory(options, dataset);
  } else if (options.checkpoint) {
    fashion_mnist::compare_checkpoint(options, dataset);
  } else {
    const auto result = fashion_mnist::train(options, dataset, group);
    if (result.signal != 0) return 128 + result.signal;
    fashion_mnist::print_summary(result);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gradaccum::keep_freed_memory();  // saves a third of a small model's time, on glibc
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
