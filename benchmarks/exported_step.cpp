// SPDX-License-Identifier: Apache-2.0
//
// A training step, forward and backward, of a model that gradaccum-export exported, on the batch of its sample; the
// time from the program's start to its first update; and its peak of memory. python/exported_models.py compares it to
// Python.

#include <gradaccum/exported_model.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <string>
#include <vector>

#include "harness.hpp"

namespace ga = gradaccum;

namespace {

ga::io::Tensors sample_batch(const std::string& folder) {
  const std::string prefix = "graph-0.batch.";
  ga::io::Tensors batch;
  for (auto& [name, tensor] : ga::io::load_file(folder + "/sample.safetensors"))
    if (name.starts_with(prefix)) batch[name.substr(prefix.size())] = tensor;
  return batch;
}

}  // namespace

int main(int argc, char** argv) {
  const auto start = std::chrono::steady_clock::now();
  std::string folder;
  const auto options = harness::parse(argc, argv, "A training step of an exported model.", [&](CLI::App& app) {
    app.add_option("folder", folder, "what gradaccum-export wrote")->required();
  });
  ga::ExportedModel model(folder);
  const auto batch = sample_batch(folder);
  ga::optim::AdamW optimizer(model->parameters(), 1e-4);
  const auto step = [&] {
    model->zero_grad();
    model->loss(batch).backward();
  };
  step();
  optimizer.step();
  const auto first = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::vector<double> times;
  const auto runs = static_cast<int>(0.2 / harness::seconds(step)) + 1;
  for (int i = 0; i < options.repeats; ++i)
    times.push_back(harness::seconds([&] {
                      for (int run = 0; run < runs; ++run) step();
                    }) /
                    runs);
  fmt::print("{} s a step, {} s to the first update, {:.2f} GB resident at most\n", harness::median(times), first,
             static_cast<double>(ga::peak_resident_memory().value_or(0)) / 1e9);
}
