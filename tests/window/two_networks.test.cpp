// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/training_state.hpp>

#include "support/files.hpp"
#include "support/models.hpp"

#include <limits>

// Objectives that alternate: the loss of a GAN's generator, or of an actor, passes through the other network, whose
// gradients must not change.

namespace ga = gradaccum;
using namespace testing;

namespace {

struct Gan {
  torch::nn::Sequential generator, discriminator;
  torch::optim::Adam g_adam, d_adam;

  Gan() : Gan(make_model(), made(3, 1)) {}
  Gan(torch::nn::Sequential g, torch::nn::Sequential d)
      : generator(g), discriminator(d), g_adam(g->parameters(), 0.02), d_adam(d->parameters(), 0.02) {}

  static torch::nn::Sequential made(std::int64_t in, std::int64_t out) {
    torch::manual_seed(2);
    torch::nn::Sequential model(torch::nn::Linear(in, 6), torch::nn::Tanh(), torch::nn::Linear(6, out));
    model->to(at::kDouble);
    return model;
  }

  at::Tensor fake(const Example& batch) { return generator->forward(batch.data); }
  at::Tensor d_loss(const Example& batch) {
    return torch::softplus(-discriminator->forward(batch.target)).mean() +
           torch::softplus(discriminator->forward(fake(batch).detach())).mean();
  }
  at::Tensor g_loss(const Example& batch) { return torch::softplus(-discriminator->forward(fake(batch))).mean(); }
  at::Tensor parameters() const { return torch::cat({flat(generator), flat(discriminator)}); }
};

at::Tensor of_large_batches(const std::vector<Example>& data, std::size_t steps) {
  Gan gan;
  for (std::size_t from = 0; from < data.size(); from += steps) {
    const auto batch = joined(data, from, from + steps);
    gan.d_adam.zero_grad();
    gan.d_loss(batch).backward();
    gan.g_adam.zero_grad();
    gan.g_loss(batch).backward({}, {}, false, gan.generator->parameters());
    gan.d_adam.step();
    gan.g_adam.step();
  }
  return gan.parameters();
}

/// Calls `train(gan, d_optimizer, g_optimizer, batch)` for all batches, and returns the parameters.
template <class Train>
at::Tensor of_windows(const std::vector<Example>& data, const Train& train) {
  Gan gan;
  ga::GradAccumulator d(gan.d_adam, {.steps = 4}), g(gan.g_adam, {.steps = 4});
  for (auto& batch : data) train(gan, d, g, batch);
  CHECK(d.updates() == static_cast<std::int64_t>(data.size() / 4));
  return gan.parameters();
}

}  // namespace

TEST_CASE("two networks: windows of a GAN equal its large batches") {
  const auto data = make_batches(std::vector<std::int64_t>(12, 5));
  const auto expected = of_large_batches(data, 4);

  const auto plain = of_windows(data, [](Gan& gan, auto& d, auto& g, auto& batch) {
    d.zero_grad();
    gan.d_loss(batch).backward();
    g.zero_grad();
    gan.g_loss(batch).backward({}, {}, false, gan.generator->parameters());
    d.step();
    g.step();
  });
  CHECK(distance(plain, expected) < 1e-12);

  const auto weighted = of_windows(data, [](Gan& gan, auto& d, auto& g, auto& batch) {
    d.backward(gan.d_loss(batch));
    g.backward(gan.g_loss(batch), {.inputs = gan.generator->parameters()});
    d.step();
    g.step();
    d.zero_grad();
    g.zero_grad();
  });
  CHECK(distance(weighted, expected) < 1e-12);

  const auto mixed = of_windows(data, [](Gan& gan, auto& d, auto& g, auto& batch) {  // a control
    gan.d_loss(batch).backward();
    d.step();
    gan.g_loss(batch).backward();
    g.step();
    if (d.micro_steps() == 0) d.zero_grad(), g.zero_grad();  // called only where it clears
  });
  CHECK(distance(mixed, expected) > 1e-3);
}

TEST_CASE("two networks: a backward in the other network's window is detected") {
  const auto data = make_batches({5, 5, 5, 5});
  Gan gan;
  ga::GradAccumulator d(gan.d_adam, {.steps = 4}), g(gan.g_adam, {.steps = 4});
  const std::string cure = ".inputs = generator->parameters()}";

  SECTION("in the plain form, by zero_grad()") {
    gan.d_loss(data[0]).backward();
    d.step();
    gan.g_loss(data[0]).backward();
    g.step();
    SECTION("after the steps") { REQUIRE_ERROR(cure, d.zero_grad()); }
    SECTION("before the next backward") {
      g.zero_grad();
      REQUIRE_ERROR("zero_grad() was called in the middle of a window", d.zero_grad());
    }
    d.discard();
    d.zero_grad();
  }
  SECTION("in the weighted form, by the next backward") {
    d.backward(gan.d_loss(data[0]));
    d.step();
    g.backward(gan.g_loss(data[0]));
    g.step();
    SECTION("of the other") { REQUIRE_ERROR(cure, d.backward(gan.d_loss(data[1]))); }
    SECTION("or its zero_grad()") { REQUIRE_ERROR(cure, d.zero_grad()); }
  }
  SECTION("where it does not come along, nothing is said") {
    d.backward(gan.d_loss(data[0]));
    d.step();
    g.backward(gan.g_loss(data[0]), {.inputs = gan.generator->parameters()});
    g.step();
    d.zero_grad();
    g.zero_grad();
    d.backward(gan.d_loss(data[1]));
  }
  SECTION("between windows it is cleared, as without an accumulator") {
    ga::GradAccumulator one(gan.d_adam), other(gan.g_adam);
    gan.d_loss(data[0]).backward();
    one.step();
    gan.g_loss(data[0]).backward();
    other.step();
    one.zero_grad();
    CHECK_FALSE(gan.discriminator->parameters()[0].grad().defined());
  }
}

TEST_CASE("two networks: with one loss scaler for both, or one each, windows equal large batches") {
  const auto data = make_batches(std::vector<std::int64_t>(12, 5));
  const auto expected = of_large_batches(data, 4);
  const bool one_for_both = GENERATE(true, false);
  ga::AmpScaler first({.init_scale = 1024}), second({.init_scale = 1 << 20});
  auto& of_d = first;
  auto& of_g = one_for_both ? first : second;
  const auto scaled = of_windows(data, [&](Gan& gan, auto& d, auto& g, auto& batch) {
    d.backward(of_d.scale(ga::Loss{gan.d_loss(batch)}));
    g.backward(of_g.scale(ga::Loss{gan.g_loss(batch)}), {.inputs = gan.generator->parameters()});
    of_d.step(d);
    of_g.step(g);
    of_d.update();
    if (!one_for_both) of_g.update();
    d.zero_grad();
    g.zero_grad();
  });
  CHECK(distance(scaled, expected) < 1e-12);
}

TEST_CASE("two networks: with one loss scaler, an overflow of one skips its step only, and lowers the common scale") {
  const auto data = make_batches(std::vector<std::int64_t>(8, 5));
  Gan gan;
  ga::GradAccumulator d(gan.d_adam, {.steps = 4}), g(gan.g_adam, {.steps = 4});
  ga::AmpScaler scaler({.init_scale = 1024});
  const auto generator = flat(gan.generator), discriminator = flat(gan.discriminator);
  for (std::size_t i = 0; i < 4; ++i) {
    const double times = i == 1 ? std::numeric_limits<double>::infinity() : 1;
    d.backward(scaler.scale(ga::Loss{gan.d_loss(data[i])}));
    g.backward(scaler.scale(ga::Loss{gan.g_loss(data[i]) * times}), {.inputs = gan.generator->parameters()});
    const auto of_d = scaler.step(d), of_g = scaler.step(g);
    CHECK(of_d == (i == 3 ? ga::StepResult::stepped : ga::StepResult::accumulated));
    CHECK(of_g == (i == 3 ? ga::StepResult::skipped : ga::StepResult::accumulated));
    scaler.update();
    CHECK(scaler.get_scale() == (i == 3 ? 512 : 1024));
    d.zero_grad();
    g.zero_grad();
  }
  CHECK(at::equal(flat(gan.generator), generator));
  CHECK_FALSE(at::equal(flat(gan.discriminator), discriminator));
}

namespace {

/// An actor whose loss passes through the critic, and a critic whose target passes through the actor: parts of one
/// model, saved as one.
struct ActorCritic : torch::nn::Module {
  torch::nn::Sequential actor = register_module("actor", Gan::made(4, 3));
  torch::nn::Sequential critic = register_module("critic", Gan::made(7, 1));

  at::Tensor value(const at::Tensor& state, const at::Tensor& action) {
    return critic->forward(torch::cat({state, action}, 1));
  }
  at::Tensor critic_loss(const Example& batch) {
    const auto reward = batch.target.sum(1, /*keepdim=*/true);
    const auto next = value(-batch.data, actor->forward(-batch.data)).detach();
    return torch::mse_loss(value(batch.data, batch.target), reward + 0.9 * next);
  }
  at::Tensor actor_loss(const Example& batch) { return -value(batch.data, actor->forward(batch.data)).mean(); }
};

struct ActorCriticTraining {
  std::shared_ptr<ActorCritic> model = std::make_shared<ActorCritic>();
  torch::optim::Adam actor_adam{model->actor->parameters(), 0.02}, critic_adam{model->critic->parameters(), 0.02};
  ga::GradAccumulator<torch::optim::Adam> actor, critic;
  ga::AmpScaler scaler{{.init_scale = 256, .growth_interval = 2}};

  explicit ActorCriticTraining(std::int64_t steps)
      : actor(actor_adam, {.steps = steps}), critic(critic_adam, {.steps = steps}) {}

  void train(const Example& batch) {
    critic.backward(scaler.scale(ga::Loss{model->critic_loss(batch)}));
    actor.backward(scaler.scale(ga::Loss{model->actor_loss(batch)}), {.inputs = model->actor->parameters()});
    scaler.step(critic);
    scaler.step(actor);
    scaler.update();
    critic.zero_grad();
    actor.zero_grad();
  }

  std::int64_t updates() const { return actor.updates(); }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(model));
    archive("actor", ga::OptimizerState(actor, model));
    archive("critic", ga::OptimizerState(critic, model));
    archive("scaler", scaler);
  }
};

}  // namespace

TEST_CASE("two networks: windows of an actor and a critic, 4 x 16, equal large batches of 64") {
  const auto data = make_batches(std::vector<std::int64_t>(12, 16));
  ActorCriticTraining windows(4), large(1), other_windows(3);
  for (auto& batch : data) windows.train(batch), other_windows.train(batch);
  for (std::size_t from = 0; from < data.size(); from += 4) large.train(joined(data, from, from + 4));
  CHECK(windows.updates() == 3);
  CHECK(distance(flat(windows.model), flat(large.model)) < 1e-12);
  CHECK(distance(flat(other_windows.model), flat(large.model)) > 1e-3);
}

TEST_CASE("two networks: resumed after any micro-batch, with the same bits") {
  const auto data = make_batches(std::vector<std::int64_t>(10, 3));
  ActorCriticTraining whole(4);
  for (auto& batch : data) whole.train(batch);
  for (std::size_t at = 0; at < data.size(); ++at) {
    CAPTURE(at);
    const Directory folder;
    ActorCriticTraining stopped(4), resumed(4);
    for (std::size_t i = 0; i < at; ++i) stopped.train(data[i]);
    ga::save(folder / "state", stopped);
    ga::load(folder / "state", resumed);
    for (std::size_t i = at; i < data.size(); ++i) resumed.train(data[i]);
    CHECK(at::equal(flat(resumed.model), flat(whole.model)));
    CHECK(resumed.scaler.get_scale() == whole.scaler.get_scale());
  }
}
