// SPDX-License-Identifier: Apache-2.0
//
// Trains a model that Python exported, without Python. Start reading in train.hpp.

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <exception>
#include <gradaccum/memory_meter.hpp>

#include "options.hpp"
#include "train.hpp"

#ifdef MKL_ON_AMD  // CMake's option
#include <gradaccum/mkl_on_amd.hpp>
#endif

namespace {

/// Returns the program's exit status.
int run(const exported_model::Options& options) {
  torch::manual_seed(0);  // of dropout
  gradaccum::ExportedModel model(options.model);
  fmt::print("{} has\n", options.model);
  for (const auto& pass : model->passes()) exported_model::Lines::print("  {}\n", pass);
  const auto report = exported_model::train(model, options);
  if (report.signal != 0) {
    fmt::print("Stopped and saved in {}: with --resume the training goes on from there\n", options.save);
    return 128 + report.signal;
  }
  if (!report.validations.empty()) fmt::print("after:  {}\n", exported_model::text_of(report.validations.back().found));
  fmt::print("{} updates, {:.1f} seconds\n", report.updates, report.seconds);
  if (!options.output.empty()) {
    model->save_weights(options.output);
    fmt::print("The trained weights are in {}\n", options.output);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gradaccum::keep_freed_memory();  // saves a third of a small model's time, on glibc
  const auto options = exported_model::parse_options(argc, argv);
  try {
    return run(options);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "exported_model: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "exported_model: {}\n", error.what());
  }
  return 1;
}
