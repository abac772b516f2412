// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>

#include "support/models.hpp"

// A small GAN: the generator's loss passes through the discriminator, whose gradients must not change.

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
