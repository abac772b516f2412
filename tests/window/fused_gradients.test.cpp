// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/models.hpp"

#include <vector>

// Gradients that a function of the user computes with the loss, compared with autograd's.

namespace ga = gradaccum;
using namespace testing;

namespace {

// A linear layer whose forward and backward are written by hand.
struct Rig {
  torch::nn::Linear layer = [] {
    torch::manual_seed(3);
    torch::nn::Linear made(4, 3);
    made->to(at::kDouble);
    return made;
  }();
  std::vector<Example> batches = make_batches({2, 5, 3, 4});
  int calls = 0;

  at::Tensor loss(int i) { return loss_of(layer, batches[static_cast<std::size_t>(i)]); }

  ga::Loss fused(int i) {
    const at::NoGradGuard no_graph;
    const auto& batch = batches[static_cast<std::size_t>(i)];
    const auto error = layer->forward(batch.data) - batch.target;
    const auto gradients = [this, error, data = batch.data](const at::Tensor& seed) {
      ++calls;
      const auto of_error = error * (2.0 / static_cast<double>(error.numel()) * seed);
      return std::vector<at::Tensor>{of_error.t().mm(data), of_error.sum(0)};
    };
    return ga::Loss{error.square().mean(), error.size(0)}.with_gradients(layer->parameters(), gradients);
  }

  at::Tensor gradients() {
    std::vector<at::Tensor> all;
    for (auto& parameter : layer->parameters()) all.push_back(parameter.grad().flatten());
    return torch::cat(all);
  }
};

}  // namespace

TEST_CASE("Loss: with_gradients gives autograd's updates, also weighted, scaled and in backward") {
  const bool in_backward = GENERATE(false, true), scaled = GENERATE(false, true);
  if (in_backward && scaled) return;
  Rig by_hand, by_autograd;
  const auto trained = [&](Rig& rig, const auto& loss) {
    ga::optim::SGD sgd(rig.layer->parameters(), 0.1);
    ga::GradAccumulator optimizer(sgd, {.steps = 2, .in_backward = in_backward});
    ga::AmpScaler scaler;
    for (int i = 0; i < 4; ++i) {
      optimizer.backward(scaled ? scaler.scale(loss(i)) : loss(i));
      if ((scaled ? scaler.step(optimizer) : optimizer.step()) && scaled) scaler.update();
      optimizer.zero_grad();
    }
    return flat(rig.layer);
  };
  const auto start = flat(by_hand.layer);
  const auto got = trained(by_hand, [&](int i) { return by_hand.fused(i); });
  const auto wanted = trained(by_autograd, [&](int i) {
    return ga::Loss{by_autograd.loss(i), by_autograd.batches[static_cast<std::size_t>(i)].data.size(0)};
  });
  CHECK(distance(got, wanted) < 1e-12);
  CHECK(distance(start, wanted) > 1e-3);
  CHECK(by_hand.calls == 4);
}

TEST_CASE("Loss: with_gradients works with a plain backward, hooks, inputs, and a loss that has changed") {
  Rig rig;
  rig.loss(0).backward();
  const auto wanted = rig.gradients().clone();
  const auto check = [&](double times, const auto& backward) {
    rig.layer->zero_grad();
    backward(rig.fused(0));
    CHECK(distance(rig.gradients(), times * wanted) < 1e-12);
  };
  check(1, [](const ga::Loss& loss) { loss.backward(); });
  check(1, [](const ga::Loss& loss) { loss.mean.backward(); });
  check(3, [](ga::Loss loss) { (loss.mean * 3).backward(); });
  check(3, [](ga::Loss loss) {
    loss.mean = loss.mean * 3;
    loss.backward();
  });
  check(3, [](ga::Loss loss) {
    loss.mean.mul_(3);
    loss.backward();
  });
  check(2, [](const ga::Loss& loss) {
    loss.backward({.retain_graph = true});
    loss.backward();
  });
  int hooked = 0;
  const auto hook = rig.layer->weight.register_hook([&](const at::Tensor&) { ++hooked; });
  check(1, [](const ga::Loss& loss) { loss.backward(); });
  check(1, [&](const ga::Loss& loss) {
    loss.mean.register_hook([&](const at::Tensor&) { ++hooked; });
    loss.backward();
  });
  CHECK(hooked == 3);
  rig.layer->weight.remove_hook(hook);

  rig.layer->zero_grad();
  rig.fused(0).backward({.inputs = {rig.layer->bias}});
  CHECK(rig.layer->bias.grad().defined());
  CHECK_FALSE(rig.layer->weight.grad().defined());
  REQUIRE_ERROR("create_graph must be false", rig.fused(0).backward({.create_graph = true}));
}

TEST_CASE("Loss: with_gradients leaves a graph to autograd if the function returns nothing") {
  Rig rig;
  rig.loss(0).backward();
  const auto wanted = rig.gradients().clone();
  rig.layer->zero_grad();
  int calls = 0;
  const auto none = [&](const at::Tensor&) {
    ++calls;
    return std::vector<at::Tensor>();
  };
  ga::Loss(rig.loss(0)).with_gradients(rig.layer->parameters(), none).backward();
  CHECK(calls == 1);
  CHECK(torch::equal(rig.gradients(), wanted));
}

TEST_CASE("Loss: gradients that the caller keeps are copied, and frozen parameters get none") {
  Rig rig;
  const auto kept = torch::ones({3, 4}, at::kDouble);
  const auto keeps = [&](const at::Tensor&) { return std::vector<at::Tensor>{kept, torch::ones({3}, at::kDouble)}; };
  rig.layer->bias.set_requires_grad(false);
  const auto loss = ga::Loss{torch::zeros({}, at::kDouble)}.with_gradients(rig.layer->parameters(), keeps);
  CHECK(loss.mean.requires_grad());
  loss.backward();
  ga::Loss{torch::zeros({}, at::kDouble)}.with_gradients(rig.layer->parameters(), keeps).backward();
  CHECK(torch::equal(rig.layer->weight.grad(), torch::full({3, 4}, 2.0, at::kDouble)));
  CHECK(torch::equal(kept, torch::ones({3, 4}, at::kDouble)));
  CHECK_FALSE(rig.layer->bias.grad().defined());
}

TEST_CASE("Loss: with_gradients refuses what backward could not add") {
  Rig rig;
  const auto parameters = rig.layer->parameters();
  const auto zero = torch::zeros({}, at::kDouble);
  const auto returning = [&](std::vector<at::Tensor> gradients) {
    return ga::Loss{zero}.with_gradients(parameters, [gradients](const at::Tensor&) { return gradients; });
  };
  REQUIRE_ERROR("must get a function", ga::Loss{zero}.with_gradients(parameters, nullptr));
  REQUIRE_ERROR(
      "got the result of an operation",
      ga::Loss{zero}.with_gradients({parameters[0] * 2}, [](const at::Tensor&) { return std::vector<at::Tensor>(); }));
  REQUIRE_ERROR("one gradient for each of the 2 parameters, got 1", returning({torch::zeros({3, 4})}).backward());
  REQUIRE_ERROR("gradient 1 of with_gradients() must have the parameter's shape [3], got [4]",
                returning({torch::zeros({3, 4}), torch::zeros({4})}).backward());
  REQUIRE_ERROR("the mean must have one element", ga::Loss{torch::zeros({2})}.with_gradients(
                                                      parameters, [](auto&) { return std::vector<at::Tensor>(); }));
  for (auto& parameter : parameters) CHECK_FALSE(parameter.grad().defined());
}
