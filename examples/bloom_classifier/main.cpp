// SPDX-License-Identifier: Apache-2.0
//
// Fine-tunes a BLOOM of Hugging Face's on texts with labels. Read train.hpp first: the rest is around it.

#include <fmt/format.h>
#include <torch/torch.h>

#include <exception>
#include <gradaccum/keep_freed_memory.hpp>

#include "demo.hpp"
#include "options.hpp"
#include "predict.hpp"
#include "run.hpp"

namespace {

/// Gives the program's status.
int run(const bloom::Options& options) {
  if (options.threads > 0) torch::set_num_threads(options.threads);
  if (options.predict) {
    bloom::print_predictions(options);
  } else if (options.demo) {
    bloom::demo(options);
  } else if (const auto trained = bloom::train(options); trained.report.signal != 0) {
    return 128 + trained.report.signal;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
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
