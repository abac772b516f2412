// SPDX-License-Identifier: Apache-2.0
//
// A training step of six networks, compiled and eager: forward and backward alone, and then an update with AdamW,
// compared to an ordinary LibTorch loop. `--record FOLDER` writes each step to a subfolder for gradaccum-compile-step;
// `--steps FOLDER` runs them.

#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <filesystem>
#include <iostream>

#include "compiled_networks.hpp"
#include "harness.hpp"

namespace ga = gradaccum;

namespace {

using compiled_networks::Batch;

template <class Model>
void record(compiled_networks::Task<Model> task, const std::filesystem::path& folder) {
  const ga::Autocast autocast(torch::kCPU, torch::kBFloat16, task.bfloat16);
  std::cout << ga::save_step(task.model, task.objective, task.batch, folder / task.name, {.any_rows = false});
}

void forward_and_backward(auto& task, auto& loss_of) {
  ga::Loss loss{at::Tensor()};
  {
    const ga::Autocast autocast(torch::kCPU, torch::kBFloat16, task.bfloat16);
    loss = loss_of(task.model, task.batch);
  }
  loss.backward();
}

template <class Model>
void compare(compiled_networks::Task<Model> task, const std::filesystem::path& folder,
             const harness::Options& options) {
  if (task.bfloat16 && !ga::is_bf16_fast(torch::kCPU)) return;
  auto compiled = task, eager = task.copy(), with_adamw = task.copy();
  ga::CompiledStep step(compiled.model, compiled.objective, folder / task.name);
  const auto alone = [](auto& task_of_one, auto& loss_of) {
    task_of_one.model->zero_grad();
    forward_and_backward(task_of_one, loss_of);
  };
  harness::contest("A step, forward and backward: " + task.title,
                   {{"CompiledStep", [&] { alone(compiled, step); }},
                    {"the objective as it is", [&] { alone(eager, eager.objective); }}},
                   static_cast<double>(task.batch.first.size(0)), "samples", options);

  const torch::optim::AdamWOptions hyper(1e-4);
  ga::optim::AdamW ours(compiled.model->parameters(), hyper), ours_eager(with_adamw.model->parameters(), hyper);
  torch::optim::AdamW theirs(eager.model->parameters(), hyper);
  const auto update = [](auto& task_of_one, auto& loss_of, auto& optimizer) {
    optimizer.zero_grad();
    forward_and_backward(task_of_one, loss_of);
    optimizer.step();
  };
  harness::contest(
      "An update, AdamW: " + task.title,
      {{"CompiledStep, ga::optim::AdamW", [&] { update(compiled, step, ours); }},
       {"the objective as it is, torch::optim::AdamW", [&] { update(eager, eager.objective, theirs); }},
       {"the objective as it is, ga::optim::AdamW", [&] { update(with_adamw, with_adamw.objective, ours_eager); }}},
      static_cast<double>(task.batch.first.size(0)), "samples", options);
  if (step.report().eager > 0) throw std::runtime_error("what was to be compiled was not");
}

void each(const auto& use) {
  using namespace compiled_networks;
  use(tiny());
  use(perceptron());
  use(convolutional());
  use(transformer("transformer", 128, 2, 64, 0, false));
  use(transformer("transformer_dropout", 256, 4, 128, 0.1, false));
  use(transformer("transformer_bfloat16", 256, 4, 128, 0, true));
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder, recorded;
  const auto options = harness::parse(argc, argv, "Compiled training steps against the objective", [&](CLI::App& app) {
    auto* record = app.add_option("--record", recorded, "record the steps in this folder, and time nothing");
    app.add_option("--steps", folder, "where the compiled steps are")->excludes(record);
  });
  if (!recorded.empty())
    each([&](auto task) { record(task, recorded); });
  else
    each([&](auto task) { compare(task, folder, options); });
}
