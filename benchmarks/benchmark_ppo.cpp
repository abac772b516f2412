// SPDX-License-Identifier: Apache-2.0
//
// The reinforcement learner examples/templates/ppo.cpp: its updates, its iterations (256 steps of environments, then 16
// updates) and its acting, against LibTorch's loop. One thread. benchmarks/python/ppo.py has the updates in Python.

#define main ppo_main  // the program itself
#include "../examples/templates/ppo.cpp"
#undef main

#include "card.hpp"
#include "harness.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace {

at::Device device = at::kCPU;

Batch minibatch_of(const Batch& batch, std::int64_t part) {
  auto minibatch = batch;
  const auto rows = batch[0].size(0) / hyper.num_minibatches;
  for (auto& tensor : minibatch) tensor = tensor.narrow(0, part * rows, rows);
  return minibatch;
}

std::unique_ptr<Training> made() {
  torch::manual_seed(1);
  auto training = std::make_unique<Training>();
  training->agent.to(device);
  return training;
}

/// The program in LibTorch alone: its Adam, its clipping, and no accumulator.
struct Plain {
  std::unique_ptr<Training> training = made();
  torch::optim::Adam adam{training->agent.parameters(), torch::optim::AdamOptions(hyper.learning_rate).eps(1e-5)};

  void update(Batch minibatch) {
    adam.zero_grad();
    objective(training->agent, minibatch).mean.backward();
    torch::nn::utils::clip_grad_norm_(training->agent.parameters(), hyper.max_grad_norm);
    adam.step();
  }
  void iterate() {
    const auto batch = training->play();
    for (std::int64_t epoch = 0; epoch < hyper.update_epochs; ++epoch) {
      const auto order = torch::randperm(batch[0].size(0), device);
      auto shuffled = batch;
      for (auto& tensor : shuffled) tensor = tensor.index_select(0, order);
      for (std::int64_t part = 0; part < hyper.num_minibatches; ++part) update(minibatch_of(shuffled, part));
    }
  }
};

/// The program as it is, with its step compiled or not.
template <class Step>
struct Ours {
  std::unique_ptr<Training> training = made();
  Step step;

  explicit Ours(auto&&... folder) : step(training->agent, objective, folder...) {}
  void update(Batch minibatch) {
    training->optimizer.backward(step(minibatch));
    training->optimizer.clip_grad_norm_(hyper.max_grad_norm);
    training->optimizer.step();
    training->optimizer.zero_grad();
  }
  void iterate() { training->iterate(step, 1'000'000'000); }
};
using Eager = Ours<ga::GraphedStep<Agent, decltype(&objective)>>;
using Compiled = Ours<ga::CompiledStep<Agent, decltype(&objective)>>;

}  // namespace

int main(int argc, char** argv) {
  std::string record, steps;
  bool on_device = false;
  auto options = harness::parse(argc, argv, "A reinforcement learner's updates and steps", [&](CLI::App& app) {
    app.add_option("--record", record, "record the training step in this folder, for gradaccum-compile-step");
    app.add_option("--steps", steps, "the folder with the compiled step");
    app.add_flag("--on-device", on_device, "learn on a GPU, whose graphs replay the step, and act there");
  });
  if (on_device) {
    if (!harness::is_there("a reinforcement learner on a device")) return 0;
    device = harness::device;
    options.finish = [] { torch::cuda::synchronize(); };
  }
  torch::set_num_threads(1);  // threads wait for one another longer than such a network computes
  if (!record.empty()) {
    const auto training = made();
    auto minibatch = minibatch_of(training->play(), 0);
    std::cout << ga::save_step(training->agent, objective, minibatch, record);
    return 0;
  }
  Plain plain;
  Eager eager;
  std::optional<Compiled> compiled;
  if (!steps.empty()) compiled.emplace(steps);
  const auto minibatch = minibatch_of(made()->play(), 0);

  const auto contest = [&](const std::string& what, const std::string& unit, double times, const auto& run) {
    std::vector<harness::Contestant> all;
    if (compiled) all.push_back({"the template, its step compiled", [&] { run(*compiled); }});
    all.push_back({"the template", [&] { run(eager); }});
    all.push_back({"LibTorch's loop", [&] { run(plain); }});
    harness::contest(what, all, times, unit, options);
  };
  contest("Updates of an actor and a critic, 4-64-64-tanh, 64 rows", "updates", 1,
          [&](auto& by) { by.update(minibatch); });
  contest("Iterations: 8 environments, 32 steps each, then 16 updates", "environment steps", 256,
          [](auto& by) { by.iterate(); });

  const at::NoGradGuard no_grad;
  auto& acting = *eager.training;
  const auto observation = torch::rand({hyper.num_envs, Environment::observation_size}, device);
  const auto action = torch::empty({hyper.num_envs}, torch::kLong);
  const auto reward = torch::empty({hyper.num_envs}), ended = torch::empty({hyper.num_envs});
  harness::contest("Acting in 8 environments",
                   {{"draw actions, step the environments", [&] { acting.act(observation, action, reward, ended); }},
                    {"the actor's forward of 8 rows", [&] { acting.agent.logits(observation); }},
                    {"the actor's forward of a row", [&] { acting.agent.logits(observation[0]); }}},
                   static_cast<double>(hyper.num_envs), "environment steps", options);
  if (on_device) harness::print_card();
}
