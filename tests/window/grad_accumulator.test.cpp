// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/models.hpp"

#include <barrier>
#include <cmath>
#include <concepts>
#include <limits>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// A parameter, an optimizer with lr 1 that shows the gradient, and a loss with a chosen gradient.
struct Probe {
  at::Tensor parameter = torch::zeros({2}, at::kDouble).set_requires_grad(true);
  torch::optim::SGD sgd{{parameter}, torch::optim::SGDOptions(1.0)};

  at::Tensor loss(double slope) const { return (parameter * slope).sum(); }
  double moved() const { return -parameter[0].item<double>(); }
};

}  // namespace

TEST_CASE("GradAccumulator: counts micro-batches, and updates on the last one") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 3});
  CHECK_FALSE(optimizer.ready());
  for (int window = 1; window <= 2; ++window) {
    for (int i = 0; i < 2; ++i) {
      CHECK(optimizer.micro_steps() == i);
      probe.loss(3.0).backward();
      CHECK_FALSE(optimizer.step());
      optimizer.zero_grad();
      CHECK(probe.parameter.grad().defined());  // does nothing inside a window
    }
    CHECK(optimizer.ready());
    probe.loss(6.0).backward();
    CHECK(optimizer.step());
    CHECK_FALSE(optimizer.ready());
    CHECK(optimizer.micro_steps() == 0);
    optimizer.zero_grad();
    CHECK_FALSE(probe.parameter.grad().defined());
    CHECK(optimizer.updates() == window);
    CHECK(probe.moved() == 4.0 * window);
  }
}

TEST_CASE("GradAccumulator: step returns its result, which converts to whether parameters were updated") {
  STATIC_REQUIRE(std::convertible_to<ga::StepResult, bool>);
  STATIC_REQUIRE_FALSE(std::convertible_to<bool, ga::StepResult>);
  using Result = ga::StepResult;
  for (Result no : {Result::accumulated, Result::empty, Result::skipped}) CHECK_FALSE(no);
  for (Result yes : {Result::stepped, Result::left_to_device}) CHECK(yes);
  auto weight = torch::zeros({2}).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  CHECK((optimizer.flush() == Result::empty));
  for (bool finite : {true, false}) {
    for (bool last : {false, true}) {
      (weight * (finite ? 1.0 : infinity)).sum().backward();
      if (last) optimizer.gradients().factor().require_finite();
      const auto result = optimizer.step();
      CHECK((result == (!last ? Result::accumulated : finite ? Result::stepped : Result::skipped)));
      bool moved = result;
      CHECK(moved == (last && finite));
    }
    optimizer.zero_grad();
  }
  CHECK((optimizer.step() == Result::accumulated));
  CHECK((optimizer.step() == Result::empty));
  weight.sum().backward();
  optimizer.step();
  CHECK((optimizer.flush() == Result::stepped));
  CHECK(optimizer.updates() == 2);
}

TEST_CASE("GradAccumulator: flush closes a shorter window with its true mean, and clears") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 4});
  CHECK_FALSE(optimizer.flush());
  for (double slope : {1.0, 2.0}) {
    probe.loss(slope).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(optimizer.flush());
  CHECK(probe.moved() == 1.5);
  CHECK(optimizer.updates() == 1);
  CHECK_FALSE(probe.parameter.grad().defined());
  CHECK_FALSE(optimizer.flush());
  CHECK(optimizer.updates() == 1);
}

TEST_CASE("GradAccumulator: flush counts backward() without a step; after loss.backward() it requires the step") {
  Probe weighted, plain;
  ga::GradAccumulator b(weighted.sgd, {.steps = 4});
  b.backward({weighted.loss(1.0), 1});
  b.step();
  b.backward({weighted.loss(2.0), 3});
  CHECK(b.micro_steps() == 1);
  CHECK(b.flush());
  CHECK(weighted.moved() == 1.75);
  ga::GradAccumulator a(plain.sgd, {.steps = 4});
  plain.loss(1.0).backward();
  a.step();
  plain.loss(2.0).backward();
  REQUIRE_ERROR("call step() for the last micro-batch", a.flush());
  a.step();
  CHECK(a.flush());
  CHECK(plain.moved() == 1.5);
}

TEST_CASE("GradAccumulator: flush of an empty window does nothing, with any .grad") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd);
  probe.loss(1.0).backward();
  optimizer.step();
  optimizer.zero_grad();
  probe.loss(100.0).backward();  // as in a GAN, when another network is trained through this one
  CHECK_FALSE(optimizer.flush());
  CHECK(probe.moved() == 1.0);
  optimizer.zero_grad();
  CHECK_FALSE(probe.parameter.grad().defined());
}

TEST_CASE("GradAccumulator: discard drops the window and clears the gradients") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  probe.loss(100.0).backward();
  optimizer.step();
  auto handle = optimizer.gradients();
  optimizer.discard();
  CHECK(handle.closed());
  CHECK(optimizer.micro_steps() == 0);
  CHECK_FALSE(probe.parameter.grad().defined());
  for (int i = 0; i < 2; ++i) {
    probe.loss(1.0).backward();
    optimizer.step();
  }
  CHECK(probe.moved() == 1.0);
  CHECK(optimizer.updates() == 1);
}

TEST_CASE("GradAccumulator: set_steps takes effect with the next window") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 3});
  const auto micro_batch = [&] {
    optimizer.zero_grad();
    probe.loss(1.0).backward();
    return optimizer.step();
  };
  micro_batch();
  optimizer.set_steps(2);
  CHECK_FALSE(optimizer.ready());
  CHECK_FALSE(micro_batch());
  CHECK(micro_batch());
  CHECK_FALSE(micro_batch());
  CHECK(micro_batch());
  optimizer.set_steps(1);  // no micro-batch yet: affects this window
  CHECK(optimizer.ready());
  CHECK(micro_batch());
  REQUIRE_ERROR("GradAccumulator: steps must be >= 1, got 0", optimizer.set_steps(0));
}

TEST_CASE("GradAccumulator: weights of any arithmetic type; the user's loss does not change") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 3});
  const auto loss = probe.loss(1.0);
  const auto before = loss.item<double>();
  optimizer.backward(ga::Loss{loss, std::int64_t{8}});
  CHECK(loss.item<double>() == before);
  CHECK(probe.parameter.grad()[0].item<double>() == 1.0);  // weights are relative to the first, which keeps magnitudes
  optimizer.step();
  optimizer.backward({probe.loss(2.0), 4u});
  optimizer.step();
  optimizer.backward({probe.loss(4.0), 4.0f});
  CHECK(optimizer.gradients().items() == 16.0);
  CHECK(optimizer.step());
  CHECK(probe.moved() == (8 * 1.0 + 4 * 2.0 + 4 * 4.0) / 16);
}

TEST_CASE("GradAccumulator: weight 0 counts, without backward") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 3});
  optimizer.backward({probe.loss(std::numeric_limits<double>::quiet_NaN()), 0});  // a mean over nothing
  optimizer.step();
  optimizer.backward({probe.loss(2.0), 5});
  optimizer.step();
  optimizer.backward({probe.loss(infinity), 0});
  CHECK(optimizer.step());
  CHECK(probe.moved() == 2.0);
}

TEST_CASE("GradAccumulator: a window of weight 0 changes nothing, momentum included") {
  Probe probe;
  torch::optim::SGD sgd({probe.parameter}, torch::optim::SGDOptions(1.0).momentum(0.9));
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  for (double weight : {1, 1, 0, 0}) {
    optimizer.backward({probe.loss(1.0), weight});
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(optimizer.updates() == 1);
  CHECK(probe.moved() == 1.0);
  optimizer.backward({probe.loss(1.0), 0});
  CHECK_FALSE(optimizer.flush());
  CHECK(probe.moved() == 1.0);
}

TEST_CASE("GradAccumulator: a window without any gradient changes nothing") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  CHECK_FALSE(optimizer.step());
  CHECK_FALSE(optimizer.step());
  CHECK(optimizer.micro_steps() == 0);
  CHECK(optimizer.updates() == 0);
}

TEST_CASE("GradAccumulator: several losses may be backpropagated before a step; they are one micro-batch") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  for (int i = 0; i < 2; ++i) {
    probe.loss(1.0).backward();
    probe.loss(2.0).backward();
    optimizer.step();
  }
  CHECK(probe.moved() == 3.0);
}

TEST_CASE("GradAccumulator: gradients() are the current window's, the current micro-batch included") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  CHECK(optimizer.gradients().items() == 0);
  probe.loss(4.0).backward();
  CHECK(optimizer.gradients().items() == 1);
  CHECK(optimizer.gradients().norm().item<double>() == Approx(4 * std::sqrt(2.0)));
  CHECK(optimizer.micro_steps() == 0);
  optimizer.step();
  CHECK(optimizer.micro_steps() == 1);
  CHECK(optimizer.gradients().items() == 1);  // before backward there is no current micro-batch
  REQUIRE(optimizer.ready());
  probe.loss(2.0).backward();
  auto handle = optimizer.gradients();
  CHECK(handle.items() == 2);
  CHECK(handle.values()[0][0].item<double>() == 3.0);  // the mean, in .grad too
  CHECK(probe.parameter.grad()[0].item<double>() == 3.0);
  probe.parameter.mutable_grad().add_(1.0);  // the user's change counts
  CHECK(optimizer.step());
  CHECK(probe.moved() == 4.0);
  CHECK(handle.closed());
  CHECK(optimizer.updates() == 1);
}

TEST_CASE("GradAccumulator: clips when the window closes, however often clipping was requested") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  for (double slope : {30.0, 50.0}) {
    probe.loss(slope).backward();
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  const double norm = 40 * std::sqrt(2.0);
  CHECK(optimizer.grad_norm().item<double>() == Approx(norm));  // before clipping, of the mean
  CHECK(probe.moved() == Approx(40 / (norm + 1e-6)));
  probe.parameter.detach().zero_();
  probe.loss(10.0).backward();  // the tail, with a new request
  optimizer.step();
  optimizer.clip_grad_norm_(infinity);
  optimizer.flush();
  CHECK(optimizer.grad_norm().item<double>() == Approx(10 * std::sqrt(2.0)));
  CHECK(probe.moved() == 10.0);
  probe.loss(10.0).backward();
  optimizer.step();
  optimizer.flush();  // no request
  REQUIRE_ERROR("grad_norm() needs a closed window", optimizer.grad_norm());
}

TEST_CASE("GradAccumulator: a clip ends with its window, and infinity as maximum keeps inf and NaN") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  probe.loss(10.0).backward();
  optimizer.clip_grad_norm_(1.0);
  optimizer.clip_grad_value_(1.0);
  optimizer.step();
  optimizer.discard();
  probe.loss(10.0).backward();
  optimizer.step();
  optimizer.flush();
  CHECK(probe.moved() == 10.0);
  (probe.parameter * torch::tensor({1.0, infinity}, at::kDouble)).sum().backward();
  optimizer.clip_grad_norm_(infinity);
  optimizer.step();
  optimizer.flush();
  CHECK(optimizer.grad_norm().item<double>() == infinity);
  CHECK(probe.moved() == 11.0);  // the finite element is unchanged
}

TEST_CASE("GradAccumulator: clip_grad_value_ clips elements of the mean") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  for (double slope : {1.0, 3.0}) {
    probe.loss(slope).backward();
    optimizer.clip_grad_value_(1.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(probe.moved() == 1.5);
}

TEST_CASE("GradAccumulator: parameter groups, frozen, shared and late parameters") {
  auto a = torch::zeros({2}, at::kDouble).set_requires_grad(true),
       b = torch::zeros({3}, at::kDouble).set_requires_grad(true);
  auto frozen = torch::ones({2}, at::kDouble), late = torch::zeros({1}, at::kDouble).set_requires_grad(true);
  torch::optim::SGD sgd({a, frozen}, torch::optim::SGDOptions(1.0));
  sgd.add_param_group({{b}, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(10.0))});
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  CHECK(optimizer.param_groups().size() == 2);
  const auto loss = [&] { return a.sum() + a.sum() + 2 * b.sum() + 4 * late.sum(); };  // a: shared by two terms
  loss().backward();
  optimizer.step();
  sgd.add_param_group({{late}, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.5))});
  loss().backward();
  CHECK(optimizer.step());
  CHECK(a[0].item<double>() == -2.0);
  CHECK(b[0].item<double>() == -20.0);
  CHECK(frozen.equal(torch::ones({2}, at::kDouble)));
  CHECK(late[0].item<double>() == -2.0);
}

TEST_CASE("GradAccumulator: tied weights, which LibTorch lists once per name, are an error; their norm counts once") {
  struct Tied : torch::nn::Module {
    at::Tensor in = register_parameter("in", torch::ones({2, 3}));
    at::Tensor out = register_parameter("out", in);
  };
  Tied model;
  torch::optim::SGD sgd(model.parameters(), 1.0);
  (model.in.sum() + model.out.sum()).backward();
  sgd.step();
  CHECK(model.in.equal(torch::full({2, 3}, -3)));  // the weight is used twice, with a gradient of 2
  ga::Gradients gradients(model.parameters());
  CHECK(ga::clip_grad_norm_(gradients, 1.0).item<double>() == Approx(std::sqrt(24)));
  const std::string twice = "lists number 0 of shape [2, 3] again as number 1";
  REQUIRE_ERROR(twice, ga::GradAccumulator(sgd, {.steps = 2}));
  torch::optim::SGD once({model.in}, 1.0);
  ga::GradAccumulator optimizer(once, {.steps = 2});
  once.param_groups().front().params().push_back(model.out);
  REQUIRE_ERROR(twice, optimizer.step());
}

TEST_CASE("GradAccumulator: a group added between backward and step, or flush") {
  for (bool flush : {false, true}) {
    Probe probe;
    auto late = torch::zeros({2}, at::kDouble).set_requires_grad(true);
    ga::GradAccumulator optimizer(probe.sgd, {.steps = 4});
    probe.loss(1.0).backward();
    optimizer.step();
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({late}));
    (probe.loss(3.0) + late.sum()).backward();
    CHECK(optimizer.gradients().items() == 2);
    if (!flush) optimizer.step();
    CHECK(optimizer.flush());
    CHECK(probe.moved() == 2.0);
    CHECK(late[0].item<double>() == -0.5);
  }
}

TEST_CASE("GradAccumulator: a parameter that some micro-batches do not use") {
  auto a = torch::zeros({1}, at::kDouble).set_requires_grad(true),
       b = torch::zeros({1}, at::kDouble).set_requires_grad(true);
  torch::optim::SGD sgd({a, b}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 4});
  for (int i = 0; i < 4; ++i) {
    (i == 2 ? (a + b).sum() : a.sum()).backward();
    optimizer.step();
  }
  CHECK(a.item<double>() == -1.0);
  CHECK(b.item<double>() == -0.25);
}

TEST_CASE("GradAccumulator: sparse gradients, and dense ones that join them") {
  for (bool mixed : {false, true}) {
    torch::manual_seed(0);
    torch::nn::Embedding one(torch::nn::EmbeddingOptions(6, 2).sparse(true)), other(torch::nn::EmbeddingOptions(6, 2));
    other->weight.detach().copy_(one->weight);
    torch::optim::SGD sgd(one->parameters(), 0.5), big(other->parameters(), 0.5);
    ga::GradAccumulator optimizer(sgd, {.steps = 3});
    std::vector<at::Tensor> losses;
    for (int i = 0; i < 3; ++i) {
      const auto ids = torch::tensor({i, i, 2});
      const auto loss = [&](auto& embedding) {
        auto value = embedding(ids).pow(2).sum();
        return mixed && i == 1 ? value + embedding->weight.sum() : value;
      };
      loss(one).backward();
      optimizer.clip_grad_norm_(0.7);
      optimizer.step();
      losses.push_back(loss(other));
    }
    (losses[0] + losses[1] + losses[2]).div(3).backward();
    torch::nn::utils::clip_grad_norm_(other->parameters(), 0.7);
    big.step();
    CHECK(torch::allclose(one->weight, other->weight, 1e-6, 1e-7));
    CHECK(optimizer.updates() == 1);
  }
}

TEST_CASE("GradAccumulator: backward that records a graph continues the sum in new tensors") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  for (int i = 0; i < 2; ++i) {
    auto loss = probe.parameter.pow(2).sum() + probe.loss(3.0);
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    optimizer.step();
  }
  CHECK(probe.moved() == 3.0);
  optimizer.discard();
}

TEST_CASE("GradAccumulator: backward that records a graph which some gradients do not depend on") {
  auto weight = torch::zeros({2}).set_requires_grad(true), bias = torch::zeros({2}).set_requires_grad(true);
  for (bool plain : {false, true}) {
    torch::optim::SGD sgd({weight, bias}, torch::optim::SGDOptions(0.0));
    ga::GradAccumulator optimizer(sgd, {.steps = 2});
    for (int i = 0; i < 2; ++i) {
      const auto loss = weight.pow(2).sum() + bias.sum();  // the bias's gradient is constant, as in a critic
      plain ? loss.backward({}, true, true) : optimizer.backward(loss, true, true);
      optimizer.step();
    }
    CHECK(optimizer.updates() == 1);
    CHECK(bias.grad()[0].item<float>() == 1.0f);
    optimizer.discard();
  }
}

TEST_CASE("GradAccumulator: gradients of complex parameters, which backward leaves conjugated") {
  auto z = torch::zeros({2}, at::kComplexDouble).set_requires_grad(true);
  torch::optim::SGD sgd({z}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  const auto c = torch::complex(torch::tensor({3.0, 0.0}, at::kDouble), torch::tensor({0.0, 4.0}, at::kDouble));
  for (int i = 0; i < 2; ++i) {
    torch::real((z.conj() * c).sum()).backward();
    optimizer.clip_grad_norm_(infinity);
    optimizer.step();
  }
  CHECK(optimizer.grad_norm().item<double>() == Approx(5.0));
  CHECK((z.detach() + c).abs().max().item<double>() < 1e-15);
}

TEST_CASE("GradAccumulator: holds no gradient that the user has cleared, and its destructor closes the window") {
  auto parameter = torch::zeros({1000}).set_requires_grad(true);
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(1.0));
  std::optional<ga::Gradients> handle;
  {
    ga::GradAccumulator optimizer(sgd, {.steps = 2});
    parameter.sum().backward();
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient(
        parameter.grad().getIntrusivePtr());
    optimizer.gradients().norm();
    optimizer.zero_grad();
    CHECK(gradient.expired());
    handle = optimizer.gradients();
  }
  CHECK(handle->closed());
}

TEST_CASE("GradAccumulator: accumulate_in keeps float32 sums for 16-bit parameters") {
  const auto error = [](at::ScalarType dtype, std::optional<at::ScalarType> sums) {
    auto weight = torch::zeros({64}, dtype).set_requires_grad(true), wide = torch::zeros({1}).set_requires_grad(true);
    torch::optim::SGD sgd({weight, wide}, torch::optim::SGDOptions(1.0));
    ga::GradAccumulator optimizer(sgd, {.steps = 256, .accumulate_in = sums});
    torch::manual_seed(3);
    auto expected = torch::zeros({64}, at::kDouble);
    for (int i = 0; i < 256; ++i) {
      auto slope = torch::rand({64}).to(dtype);
      expected += slope.to(at::kDouble) / 256;
      ((weight * slope).sum().to(at::kFloat) + wide.sum()).backward();
      optimizer.step();
      if (sums && i < 255) CHECK_FALSE(weight.grad().defined());  // .grad is free between micro-batches
      CHECK(wide.grad().defined() != (i == 256));                 // as wide as the sums: summed in .grad
      optimizer.zero_grad();
    }
    CHECK(optimizer.updates() == 1);
    CHECK(wide.item<float>() == -1.0f);
    return (weight.detach().to(at::kDouble) + expected).abs().mean().item<double>();
  };
  CHECK(error(at::kBFloat16, at::kFloat) < 1e-3);
  CHECK(error(at::kHalf, at::kFloat) < 2e-4);
  CHECK(error(at::kBFloat16, {}) > 5e-3);  // control: 16-bit sums lose small terms
}

TEST_CASE("GradAccumulator: separate sums become .grad by apply, and may be changed there") {
  auto weight = torch::zeros({2}, at::kBFloat16).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2, .accumulate_in = at::kFloat});
  (weight * 1.0).sum().backward();
  optimizer.step();
  (weight * 3.0).sum().backward();
  REQUIRE(optimizer.ready());
  CHECK(optimizer.gradients().raw()[0].scalar_type() == at::kFloat);
  CHECK(optimizer.gradients().values()[0][0].item<float>() == 2.0f);
  CHECK(weight.grad()[0].item<float>() == 2.0f);
  weight.mutable_grad().add_(6.0);
  optimizer.clip_grad_norm_(std::sqrt(2.0));  // sees the change: 8 becomes 1
  CHECK(optimizer.step());
  CHECK(optimizer.grad_norm().item<double>() == Approx(8 * std::sqrt(2.0)));
  CHECK(weight[0].item<float>() == -1.0f);
  optimizer.zero_grad();
  (weight * 5.0).sum().backward();  // the next window begins empty
  optimizer.step();
  optimizer.flush();
  CHECK(weight[0].item<float>() == -6.0f);
}

TEST_CASE("GradAccumulator: with separate sums, values can also be clipped and changed") {
  auto weight = torch::zeros({2}, at::kBFloat16).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2, .accumulate_in = at::kFloat});
  for (int i = 0; i < 2; ++i) {
    (weight * 8.0).sum().backward();
    optimizer.clip_grad_value_(0.5);
    optimizer.step();
  }
  CHECK(weight[0].item<float>() == -0.5f);
  optimizer.zero_grad();
  for (int i = 0; i < 2; ++i) {
    (weight * 8.0).sum().backward();
    if (optimizer.ready())
      for (auto& gradient : optimizer.gradients().values()) gradient.fill_(100);
    optimizer.step();
  }
  CHECK(weight[0].item<float>() == -100.5f);
  optimizer.gradients().norm();  // reads the old gradients, which are not in the new window
  optimizer.zero_grad();
  weight.detach().zero_();
  (weight * 1.0).sum().backward();
  optimizer.step();
  optimizer.flush();
  CHECK(weight[0].item<float>() == -1.0f);
}

TEST_CASE("GradAccumulator: separate sums of sparse gradients, and dense ones that join them") {
  auto weight = torch::zeros({4, 1}, at::kBFloat16).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 3, .accumulate_in = at::kFloat});
  const auto sparse = [&] { torch::embedding(weight, torch::tensor({1, 1}), -1, false, true).sum().backward(); };
  sparse();
  optimizer.step();
  weight.sum().backward();
  optimizer.step();
  sparse();
  optimizer.step();
  CHECK(optimizer.updates() == 1);
  CHECK(torch::allclose(weight.detach().to(at::kFloat).flatten(), -torch::tensor({1.0f, 5.0f, 1.0f, 1.0f}) / 3, 1e-2));
}

TEST_CASE("GradAccumulator: any number of micro-batches keeps the memory constant") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 1'000'000});
  for (int i = 0; i < 1000; ++i) {
    probe.loss(1.0).backward();
    optimizer.step();
  }
  CHECK(optimizer.micro_steps() == 1000);
  CHECK(optimizer.flush());
  CHECK(probe.moved() == 1.0);
}

TEST_CASE("GradAccumulator: describes the wrapped optimizer") {
  Probe probe;
  CHECK(ga::GradAccumulator(probe.sgd, {.steps = 4}).description() ==
        "Wrapping 'SGD' optimizer with gradient accumulation of 4 steps");
  torch::optim::Optimizer& behind = probe.sgd;
  CHECK(ga::GradAccumulator(behind).description() == "Wrapping 'SGD' optimizer with gradient accumulation of 1 step");
}

TEST_CASE("GradAccumulator: models the optimizer concept; LBFGS does not") {
  STATIC_REQUIRE(ga::optimizer<ga::GradAccumulator<torch::optim::SGD>>);
  STATIC_REQUIRE(ga::accumulating<ga::GradAccumulator<torch::optim::SGD>>);
  STATIC_REQUIRE(ga::optimizer<torch::optim::Optimizer>);
  STATIC_REQUIRE_FALSE(ga::optimizer<torch::optim::LBFGS>);
  STATIC_REQUIRE_FALSE(ga::accumulating<torch::optim::SGD>);
}

TEST_CASE("GradAccumulator: parameters on several devices", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  auto cpu = torch::zeros({1}, at::kDouble).set_requires_grad(true);
  auto gpu = torch::zeros({1}, torch::dtype(at::kDouble).device(at::kCUDA)).set_requires_grad(true);
  torch::optim::SGD sgd({cpu, gpu}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  for (int i = 0; i < 2; ++i) {
    (3 * cpu.sum() + 4 * gpu.sum().cpu()).backward();
    optimizer.clip_grad_norm_(0.5);
    optimizer.step();
  }
  CHECK(optimizer.grad_norm().item<double>() == 5.0);
  CHECK(cpu.item<double>() == Approx(-0.3));
  CHECK(gpu.item<double>() == Approx(-0.4));
}

TEST_CASE("accumulator: a function can return one; moving is allowed only between windows") {
  const auto data = make_batches({5, 5, 5, 5});
  auto model = make_model(), other = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1), plain(other->parameters(), 0.1);
  const auto made = [&] {
    ga::GradAccumulator first(sgd, {.steps = 2, .accumulate_in = at::kDouble});
    loss_of(model, data[0]).backward();
    first.step();
    REQUIRE_ERROR("GradAccumulator: must be moved between windows",
                  ga::GradAccumulator<torch::optim::SGD>(std::move(first)));
    loss_of(model, data[1]).backward();
    CHECK(first.step());
    first.zero_grad();
    return ga::GradAccumulator<torch::optim::SGD>(std::move(first));
  };
  auto moved = made();
  ga::GradAccumulator expected(plain, {.steps = 2});
  for (std::size_t i = 0; i < data.size(); ++i) {
    loss_of(other, data[i]).backward();
    expected.step();
    expected.zero_grad();
    if (i < 2) continue;
    loss_of(model, data[i]).backward();
    moved.step();
    moved.zero_grad();
  }
  CHECK(moved.updates() == 2);
  CHECK(torch::equal(flat(model), flat(other)));
  torch::optim::Optimizer& held = moved;
  REQUIRE_ERROR("cannot be moved after it was used as a torch::optim::Optimizer&",
                ga::GradAccumulator<torch::optim::SGD>(std::move(moved)));
  CHECK(held.parameters().size() == 4);
}

TEST_CASE("accumulator: in_backward works after a move") {
  auto model = make_model(), other = make_model();
  ga::optim::SGD sgd(model->parameters(), 0.1), plain(other->parameters(), 0.1);
  ga::GradAccumulator first(sgd, {.in_backward = true});
  auto moved = std::move(first);
  const auto batch = make_batches({5})[0];
  moved.backward(loss_of(model, batch));
  CHECK(moved.step());
  loss_of(other, batch).backward();
  plain.step();
  CHECK(torch::equal(flat(model), flat(other)));
}

TEST_CASE("accumulator: step(closure) runs it and returns its loss") {
  auto model = make_model(), other = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1), plain(other->parameters(), 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  const auto batch = make_batches({5})[0];
  for (int i = 0; i < 2; ++i) {
    const torch::NoGradGuard no_grad;
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      auto mean = loss_of(model, batch);
      mean.backward();
      return mean;
    });
    CHECK(loss.item<double>() == loss_of(other, batch).item<double>());
  }
  loss_of(other, batch).backward();
  plain.step();
  CHECK(optimizer.updates() == 1);
  CHECK(distance(model, other) < 1e-14);
}

TEST_CASE("GradAccumulator: a pool of threads that take turns equals one large batch") {
  constexpr std::int64_t threads = 4, windows = 3, rows = 2;
  const auto make = [] {
    torch::manual_seed(0);
    torch::nn::Sequential net(torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2));
    net->to(at::kDouble);
    return net;
  };
  auto net = make(), large = make();
  const auto x = torch::randn({windows, threads * rows, 3}, at::kDouble);
  const auto y = torch::randn({windows, threads * rows, 2}, at::kDouble);
  torch::optim::SGD sgd(net->parameters(), 0.1), of_large(large->parameters(), 0.1);
  for (std::int64_t window = 0; window < windows; ++window) {
    of_large.zero_grad();
    torch::mse_loss(large->forward(x[window]), y[window]).backward();
    of_large.step();
  }
  ga::GradAccumulator optimizer(sgd, {.steps = threads});
  std::mutex turn;
  std::barrier window_ends(threads);
  std::vector<std::thread> pool;
  for (std::int64_t thread = 0; thread < threads; ++thread)
    pool.emplace_back([&, thread] {
      for (std::int64_t window = 0; window < windows; ++window) {
        const auto part = [&](auto& all) { return all[window].narrow(0, thread * rows, rows); };
        const auto loss = torch::mse_loss(net->forward(part(x)), part(y));
        {
          const std::lock_guard lock(turn);
          optimizer.backward(ga::Loss{loss, rows});
          optimizer.step();
          optimizer.zero_grad();
        }
        window_ends.arrive_and_wait();
      }
    });
  for (auto& thread : pool) thread.join();
  CHECK(optimizer.updates() == windows);
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(net->parameters()[i].allclose(large->parameters()[i], 1e-12, 1e-12));
}

TEST_CASE("GradAccumulator: threads that do not take turns are refused immediately") {
  Probe probe;
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 2});
  const auto error_in_thread = [](const auto& call) {
    std::string error;
    std::thread([&] { error = error_of(call); }).join();
    return error;
  };
  const auto refused = [&](const auto& call) {
    return error_in_thread(call).find("each thread must hold one lock") != std::string::npos;
  };
  SECTION("between backward and step of another") {
    optimizer.backward(probe.loss(3));
    CHECK(refused([&] { optimizer.backward(probe.loss(9)); }));
    CHECK(refused([&] { optimizer.zero_grad(); }));
    CHECK(error_in_thread([&] { optimizer.step(); }).empty());  // backward in a worker, step in the owner
    optimizer.backward(probe.loss(5));
    optimizer.step();
    CHECK(probe.moved() == 4);
  }
  SECTION("in the middle of a backward of another") {
    auto loss = (probe.parameter * 2).sum() * 3;
    loss.register_hook([&](const at::Tensor&) {
      CHECK(refused([&] { optimizer.step(); }));
      CHECK(refused([&] { optimizer.flush(); }));
      CHECK(refused([&] { optimizer.discard(); }));
      CHECK(refused([&] { optimizer.zero_grad(); }));
      CHECK(refused([&] { optimizer.gradients(); }));
    });
    optimizer.backward(loss);
    optimizer.step();
    CHECK(optimizer.flush());
    CHECK(probe.moved() == 6);
    CHECK(error_in_thread([&] { optimizer.zero_grad(); }).empty());
  }
}

TEST_CASE("GradAccumulator: saves and loads the wrapped optimizer's state by its own functions") {
  Probe probe;
  probe.sgd = torch::optim::SGD({probe.parameter}, torch::optim::SGDOptions(0.5).momentum(0.5));
  ga::GradAccumulator optimizer(probe.sgd, {.steps = 1});
  const auto train = [&] {
    optimizer.backward(probe.loss(2));
    optimizer.step();
    optimizer.zero_grad();
  };
  train();
  torch::serialize::OutputArchive saved;
  optimizer.save(saved);
  std::stringstream file;
  saved.save_to(file);
  train();
  const double with_momentum = probe.moved();
  const at::NoGradGuard no_grad;
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  optimizer.load(archive);
  probe.parameter.fill_(-1);
  const at::AutoGradMode gradients(true);
  train();
  CHECK(probe.moved() == with_momentum);
  optimizer.set_steps(2);
  optimizer.backward(probe.loss(2));
  optimizer.step();
  torch::serialize::OutputArchive within;
  REQUIRE_ERROR("micro-batches in the open window", optimizer.save(within));
}
