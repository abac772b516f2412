// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>

#include "support/models.hpp"

#include <limits>

// Optimizers that take the deferred factor, directly or behind a reference; and windows that must be finite.

namespace ga = gradaccum;
using namespace testing;

namespace {

// SGD that multiplies by the factor in its own pass, and records its arguments.
struct TakingSGD : torch::optim::SGD, ga::TakesGradients {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override { return SGD::step(closure); }
  void step(ga::Gradients gradients) override {
    at::NoGradGuard no_grad;
    ++taken;
    for (std::size_t i = 0; i < gradients.raw().size(); ++i)
      gradients.parameters()[i].sub_(gradients.raw()[i] * gradients.multiplier(at::kCPU), 1.0);
  }
  int taken = 0;
};

// A class like TakingSGD without LibTorch's base class.
struct Plain {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  int stepped = 0, taken = 0;
  auto& param_groups() { return groups; }
  void zero_grad() {
    for (auto& p : groups[0].params()) p.mutable_grad().reset();
  }
  void step() { ++stepped; }
  void step(ga::Gradients gradients) { taken += gradients.multiplier(at::kCPU).item<double>() == 0.5; }
};

template <class Optimizer>
double moved_by(Optimizer& optimizer, at::Tensor parameter) {
  ga::GradAccumulator accumulator(optimizer, {.steps = 2});
  for (double slope : {2.0, 4.0}) {
    (parameter * slope).sum().backward();
    accumulator.step();
  }
  CHECK(parameter.grad()[0].template item<double>() == 6.0);  // unchanged: the sum
  return -parameter[0].template item<double>();
}

}  // namespace

TEST_CASE("TakesGradients: gets the raw sums and the factor, also behind a reference") {
  auto a = torch::zeros({2}, at::kDouble).set_requires_grad(true), b = a.detach().clone().set_requires_grad(true);
  TakingSGD direct({a}, torch::optim::SGDOptions(1.0)), hidden({b}, torch::optim::SGDOptions(1.0));
  torch::optim::Optimizer& behind = hidden;
  CHECK(moved_by(direct, a) == 3.0);
  CHECK(moved_by(behind, b) == 3.0);
  CHECK(direct.taken == 1);
  CHECK(hidden.taken == 1);
}

TEST_CASE("takes_gradients: a class without virtual functions") {
  STATIC_REQUIRE(ga::takes_gradients<Plain>);
  STATIC_REQUIRE_FALSE(ga::takes_gradients<torch::optim::SGD>);
  Plain plain;
  auto parameter = torch::zeros({1}).set_requires_grad(true);
  plain.groups.emplace_back(std::vector<at::Tensor>{parameter});
  ga::GradAccumulator accumulator(plain, {.steps = 2});
  for (int i = 0; i < 2; ++i) {
    parameter.sum().backward();
    accumulator.step();
  }
  CHECK(plain.taken == 1);
  CHECK(plain.stepped == 0);
}

TEST_CASE("take_step: with require_finite, an overflow discards the window and changes nothing") {
  for (bool overflow : {false, true})
    for (bool taking : {false, true}) {
      auto parameter = torch::zeros({2}).set_requires_grad(true);
      torch::optim::SGD plain({parameter}, torch::optim::SGDOptions(1.0).momentum(0.9));
      TakingSGD takes({parameter}, torch::optim::SGDOptions(1.0));
      torch::optim::Optimizer& chosen = taking ? static_cast<torch::optim::Optimizer&>(takes) : plain;
      ga::GradAccumulator accumulator(chosen, {.steps = 2});
      (parameter * (overflow ? std::numeric_limits<float>::infinity() : 8.0)).sum().backward();
      accumulator.step();
      (parameter * 8.0).sum().backward();
      auto handle = accumulator.gradients();
      handle.factor().divide(4.0);
      handle.factor().require_finite();
      CHECK(accumulator.step() == !overflow);
      CHECK(handle.closed());
      CHECK(handle.found_inf().item<float>() == float(overflow));
      CHECK(accumulator.updates() == !overflow);
      CHECK(parameter[0].item<float>() == (overflow ? 0.0f : -2.0f));
      CHECK(parameter.grad().defined() == !overflow);  // a discarded window is cleared immediately
      CHECK(plain.state().empty() == (taking || overflow));
      CHECK(takes.taken == (taking && !overflow));
    }
}
