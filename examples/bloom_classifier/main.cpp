// SPDX-License-Identifier: Apache-2.0
//
// Fine-tunes a BLOOM of Hugging Face's on texts with labels. Start reading in train.hpp.

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/process_group.hpp>
#include <stdexcept>

#include "demo.hpp"
#include "demo_of_size.hpp"
#include "kernel_caches.hpp"
#include "options.hpp"
#include "predict.hpp"
#include "run.hpp"

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
void join_others(bloom::Options& options) {
  options.group = gradaccum::ProcessGroup::from_environment();
  if (options.group.world_size() == 1) return;
  if (options.predict || options.make || options.demo)
    throw std::invalid_argument("predict, make and --demo are for one process");
  if (options.in_backward) throw std::invalid_argument("--in-backward is for one process");
  if (options.device == "cuda") options.device = options.group.device().str();
  if (options.group.rank() != 0 && std::freopen("/dev/null", "w", stdout) == nullptr)
    throw std::runtime_error("no /dev/null");
}

/// Returns the program's exit status.
int run(bloom::Options options) {
  // On a GPU cuDNN's attention builds a plan for each new length: on an H200 15.9 reviews/s, without it 102.8.
  // (setSDPPriorityOrder() is no help here: LibTorch puts cuDNN first again when attention first runs on a GPU.)
  at::globalContext().setSDPUseCuDNN(false);
  join_others(options);
  if (options.threads > 0) torch::set_num_threads(options.threads);
  if (options.predict) {
    bloom::print_predictions(options);
  } else if (options.make) {
    bloom::make(options);
  } else if (options.demo && !options.size.empty()) {
    bloom::demo_of_size(options);
    print_mkl();
  } else if (options.demo) {
    bloom::demo(options);
    print_mkl();
  } else if (const auto trained = bloom::train(options); trained.report.signal != 0) {
    return 128 + trained.report.signal;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  bloom::limit_kernel_caches();
  gradaccum::keep_freed_memory();
  const auto options = bloom::parse_options(argc, argv);
  try {
    return run(options);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "bloom_classifier: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "bloom_classifier: {}\n", error.what());
  }
  return 1;
}
