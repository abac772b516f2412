// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#define main ppo_main  // the program itself
#include "templates/ppo.cpp"
#undef main

#include "examples/cart_pole_values.hpp"
#include "pytorch_values/ppo.hpp"
#include "support/files.hpp"
#include "support/models.hpp"
#include "support/waves.hpp"

#include <cmath>
#include <vector>

// The template ppo.cpp: its environment and its update against Python's, that it learns, and that it resumes.

TEST_CASE("ppo: CartPole has the states of Gymnasium's") {
  for (auto& episode : cart_pole_episodes) {
    Environment environment{.cart = episode.start};
    for (std::size_t i = 0; i < episode.states.size(); ++i) {
      const auto [reward, ended] = environment.step(i % 3 == 2 ? 1 : static_cast<std::int64_t>(i % 2));
      CHECK(reward == 1);
      CHECK(ended == (i + 1 == episode.states.size()));
      for (std::size_t k = 0; k < 4; ++k) CHECK(environment.cart[k] == Approx(episode.states[i][k]).epsilon(1e-12));
    }
  }
}

TEST_CASE("ppo: updates have the values of Python's, with a live rate, step count and norm") {
  using testing::waves;
  const std::int64_t n = pytorch_values::ppo_rows;
  Training training;
  training.agent.to(at::kDouble);
  testing::fill_with_waves(&training.agent, 0.2);
  Batch batch{waves({n, 4}, 100),
              (waves({n}, 300) > 0).to(at::kLong),
              waves({n}, 400) * 0.3 - 0.7,
              waves({n}, 500),
              waves({n}, 600),
              waves({n}, 700) * 2};
  const auto& updates = pytorch_values::ppo_updates;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    training.rates.set(hyper.learning_rate * (1 - static_cast<double>(i) / static_cast<double>(updates.size())));
    const auto loss = objective(training.agent, batch);
    CHECK(loss.mean.item<double>() == Approx(updates[i][0]).epsilon(1e-9));
    training.optimizer.backward(loss);
    training.optimizer.clip_grad_norm_(hyper.max_grad_norm);
    training.optimizer.step();
    training.optimizer.zero_grad();
    CHECK(training.optimizer.grad_norm().item<double>() == Approx(updates[i][1]).epsilon(1e-9));
    auto parameters = training.agent.parameters();
    for (std::size_t k = 0; k < parameters.size(); ++k)
      CHECK(parameters[k].detach().square().sum().item<double>() == Approx(updates[i][2 + k]).epsilon(1e-9));
  }
}

TEST_CASE("ppo: micro-batches of a minibatch give its gradient") {
  torch::manual_seed(1);
  Training training;
  auto batch = training.play();
  training.agent.to(at::kDouble);
  for (auto& tensor : batch)
    if (tensor.is_floating_point()) tensor = tensor.to(at::kDouble);
  const auto gradient_in = [&](std::int64_t parts) {
    ga::GradAccumulator optimizer(training.adam, {.steps = parts});
    const auto rows = batch[0].size(0) / parts;
    for (std::int64_t part = 0; part < parts; ++part) {
      auto minibatch = batch;
      for (auto& tensor : minibatch) tensor = tensor.narrow(0, part * rows, rows);
      optimizer.backward(objective(training.agent, minibatch));
      if (part + 1 < parts) optimizer.step();
    }
    std::vector<at::Tensor> gradients;
    for (auto& gradient : optimizer.gradients().values()) gradients.push_back(gradient.flatten().clone());
    optimizer.discard();
    optimizer.zero_grad();
    return torch::cat(gradients);
  };
  CHECK(testing::distance(gradient_in(4), gradient_in(1)) < 1e-12);
}

TEST_CASE("ppo: in mixed precision gradients have the values of float32's, to half's rounding") {
  torch::manual_seed(1);
  Training training;
  auto batch = training.play();
  const auto gradient = [&](bool fp16) {
    hyper.fp16 = fp16;
    ga::AmpScaler scaler({.init_scale = 1024, .enabled = fp16});
    ga::GradAccumulator optimizer(training.adam);
    optimizer.backward(scaler.scale(objective(training.agent, batch)));
    scaler.unscale_(optimizer);
    hyper.fp16 = false;
    std::vector<at::Tensor> gradients;
    for (auto& one : optimizer.gradients().values()) gradients.push_back(one.flatten().clone());
    optimizer.discard();
    optimizer.zero_grad();
    return torch::cat(gradients);
  };
  const auto plain = gradient(false), mixed = gradient(true);
  CHECK(((mixed - plain).norm() / plain.norm()).item<double>() < 0.01);
  CHECK_FALSE(at::equal(mixed, plain));

  hyper.fp16 = true;
  Training scaled;
  auto step = [&](Batch& minibatch) { return objective(scaled.agent, minibatch); };
  for (int i = 0; i < 2; ++i) scaled.iterate(step, 150'000);
  hyper.fp16 = false;
  CHECK(scaled.scaler.get_scale() < 65536);  // its first value, by which gradients overflow
  CHECK(scaled.updates() > 24);              // of 32
}

TEST_CASE("ppo: the objective says its parts, and a target of the KL divergence ends an iteration") {
  torch::manual_seed(1);
  Training training;
  auto batch = training.play();
  const auto before = objective(training.agent, batch).output;
  CHECK(before[3].item<double>() == Approx(0).margin(1e-6));  // the policy has not moved
  auto step = [&](Batch& minibatch) { return objective(training.agent, minibatch); };
  training.iterate(step, 150'000);
  CHECK(training.updates() == 16);
  const auto loss = objective(training.agent, batch);
  const auto of = [&](int i) { return loss.output[i].item<double>(); };
  CHECK(loss.mean.item<double>() == Approx(of(0) + hyper.vf_coef * of(1) - hyper.ent_coef * of(2)));
  const auto log_probs = training.agent.logits(batch[0]).log_softmax(1);
  CHECK(of(2) == Approx(-(log_probs.exp() * log_probs).sum(1).mean().item<double>()));
  CHECK(of(3) > 0);

  hyper.target_kl = 1e-12;
  training.iterate(step, 150'000);
  hyper.target_kl = 0;
  CHECK(training.updates() == 20);  // one pass over the four minibatches
}

TEST_CASE("ppo: learns, and resumes with the same bits") {
  const auto objective_of = [](Training& training) {
    return [&training](Batch& minibatch) { return objective(training.agent, minibatch); };
  };
  torch::manual_seed(1);
  Training whole;
  auto step = objective_of(whole);
  const testing::Directory folder;
  while (whole.timesteps < 50'000) {
    whole.iterate(step, 150'000);
    if (whole.timesteps == 40'960) ga::save(folder / "states", whole);
  }
  CHECK(whole.mean_return() > 100);  // 20 without learning, and 500 at best
  torch::manual_seed(2);
  Training resumed;
  ga::load(folder / "states", resumed);
  auto other_step = objective_of(resumed);
  while (resumed.timesteps < 50'000) resumed.iterate(other_step, 150'000);
  CHECK(at::equal(testing::flat(&resumed.agent), testing::flat(&whole.agent)));
  CHECK(resumed.mean_return() == whole.mean_return());
}
