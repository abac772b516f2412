// SPDX-License-Identifier: Apache-2.0
//
// Trains a small network on FashionMNIST with gradient accumulation. Start reading in own_loop.hpp or with_trainer.hpp.

#include <cstdio>
#include <exception>
#include <stdexcept>

#include "compare.hpp"
#include "own_loop.hpp"

#ifdef MKL_ON_AMD  // CMake's option
#include <gradaccum/mkl_on_amd.hpp>
#endif

namespace fashion_mnist {

/// Joins the other ranks, if there are any. Rank 0 prints and saves, and each rank uses its own GPU.
ga::ProcessGroup join_others(Options& options) {
  const auto group = ga::ProcessGroup::from_environment();
  if (group.world_size() == 1) return group;
  if (options.compare || options.compare_micro_batches)
    throw std::invalid_argument("--compare and --compare-micro-batches are for one process");
  if (options.device == "cuda") options.device = group.device().str();
  if (group.rank() != 0 && std::freopen("/dev/null", "w", stdout) == nullptr) throw std::runtime_error("no /dev/null");
  return group;
}

/// Returns the program's exit status.
int run(Options options) {
  const auto group = join_others(options);
  const auto dataset = load_dataset(options.data, options.device, options.scalar_type());
  if (!options.record_step.empty()) {
    Setup setup(options, dataset);
    const ga::Autocast autocast(options.device, options.autocast_type(), options.mixed_precision());
    const auto recorded = ga::save_step(setup.model, objective, *setup.batches.begin(), options.record_step);
    fmt::print("{}", fmt::streamed(recorded));
    return 0;
  }
  if (options.compare) return compare(options, dataset), 0;
  if (options.compare_micro_batches) return compare_micro_batches(options, dataset), 0;
  return options.trainer ? run_with_trainer(options, dataset, group) : run_by_hand(options, dataset, group);
}

}  // namespace fashion_mnist

int main(int argc, char** argv) {
  gradaccum::keep_freed_memory();  // saves a third of a small model's time, on glibc
  try {
    return fashion_mnist::run(fashion_mnist::parse_options(argc, argv));
  } catch (const c10::Error& error) {
    fmt::print(stderr, "fashion_mnist: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "fashion_mnist: {}\n", error.what());
  }
  return 1;
}
