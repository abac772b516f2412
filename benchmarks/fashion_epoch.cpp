// SPDX-License-Identifier: Apache-2.0
//
// Trains on FashionMNIST with AdamW for a few epochs, as one of benchmark_epoch's programs, in a separate process with
// its own malloc. compare_processes.py runs it.

#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <iostream>

#include "fashion_programs.hpp"
#include "harness.hpp"

namespace {

using namespace fashion_programs;

Program make_program(const std::string& kind, const Settings& settings) {
  const torch::optim::AdamWOptions adamw(3e-4);
  if (kind.starts_with("libtorch"))
    return libtorch<torch::optim::AdamW>(settings, "AdamW", adamw, kind == "libtorch-test-later");
  ga::keep_freed_memory();
  return ours<ga::optim::AdamW>(settings, adamw, kind == "ours-bf16");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string kind = "ours";
  std::string recorded;
  int epochs = 3;
  const auto options = harness::parse(argc, argv, "FashionMNIST by one program", [&](CLI::App& app) {
    app.add_option("program", kind)->check(CLI::IsMember({"ours", "ours-bf16", "libtorch", "libtorch-test-later"}));
    app.add_option("--data", settings.data, "the data set");
    app.add_option("--epochs", epochs, "how many")->check(CLI::Range(1, 1000));
    app.add_option("--seed", settings.seed, "of the first parameters and of the order of images");
    auto* step = app.add_option("--step", settings.compiled_step, "ours: where the compiled step is");
    app.add_option("--record", recorded, "record the step of ours in this folder, and train nothing")->excludes(step);
  });
  if (!recorded.empty()) {
    std::cout << fashion_programs::record_step(recorded, kind == "ours-bf16");
    return 0;
  }
  const auto program = make_program(kind, settings);
  std::vector<double> times;
  for (int epoch = 0; epoch < epochs; ++epoch) times.push_back(harness::seconds(program.epoch));
  const auto correct = program.accuracy();
  fmt::print("{}: {:.3f} s an epoch, {:.1f} % after {}\n", program.name, harness::median(times), correct, epochs);
  harness::append_json(options, fmt::format(R"({{"contestant": "{}", "median_s": {}, "accuracy": {}}})", program.name,
                                            harness::median(times), correct));
}
