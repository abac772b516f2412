// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>

#include "support/models.hpp"

#include <sstream>

// PyTorch's way of writing C++ programs works with the drop-in: a `Net model;` by value, functions that take a
// `torch::optim::Optimizer&`, LibTorch's schedulers, torch::save and torch::load.

namespace ga = gradaccum;
using namespace testing;

namespace {

struct Net : torch::nn::Module {
  Net() : fc1(4, 8), fc2(8, 3) {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1, fc2;
};

// As in pytorch/examples: the function knows nothing of windows.
void train(Net& model, const std::vector<Example>& data, torch::optim::Optimizer& optimizer) {
  model.train();
  for (auto& batch : data) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model.forward(batch.data), batch.target);
    loss.backward();
    optimizer.step();
  }
}

at::Tensor flat_of(Net& model) { return flat(&model); }

std::vector<Example> in_windows(const std::vector<Example>& data, std::size_t steps) {
  std::vector<Example> windows;
  for (std::size_t from = 0; from < data.size(); from += steps) windows.push_back(joined(data, from, from + steps));
  return windows;
}

}  // namespace

TEST_CASE("facade: a function that takes an Optimizer& trains in windows") {
  const auto data = make_batches(std::vector<std::int64_t>(12, 5));
  torch::manual_seed(1);
  Net accumulated;
  torch::manual_seed(1);
  Net large;
  using Options = torch::optim::AdamWOptions;
  torch::optim::AdamW wrapped(accumulated.parameters(), Options(1e-2)), plain(large.parameters(), Options(1e-2));
  ga::GradAccumulator optimizer(wrapped, {.steps = 4});
  for (int epoch = 0; epoch < 2; ++epoch) {
    train(accumulated, data, optimizer);
    train(large, in_windows(data, 4), plain);
  }
  CHECK(optimizer.updates() == 6);
  CHECK(distance(flat_of(accumulated), flat_of(large)) < 1e-12);
  CHECK_FALSE(accumulated.parameters()[0].grad().defined());  // its step clears: its zero_grad cannot
}

TEST_CASE("facade: StepLR reaches the wrapped optimizer") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.4), plain(make_model()->parameters(), 0.4);
  sgd.add_param_group({{torch::zeros({1}).set_requires_grad(true)}, std::make_unique<torch::optim::SGDOptions>(0.2)});
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  torch::optim::StepLR scheduler(optimizer, 1, 0.5), reference(plain, 1, 0.5);
  for (int i = 0; i < 3; ++i) {
    scheduler.step();
    reference.step();
    CHECK(optimizer.param_groups()[0].options().get_lr() == plain.param_groups()[0].options().get_lr());
    CHECK(sgd.param_groups()[0].options().get_lr() == plain.param_groups()[0].options().get_lr());
    CHECK(sgd.param_groups()[1].options().get_lr() == plain.param_groups()[0].options().get_lr() / 2);
  }
  CHECK(sgd.param_groups()[0].options().get_lr() == 0.1);  // LibTorch's first step() changes nothing
}

TEST_CASE("facade: whoever set the learning rate last is heard") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.4);
  ga::GradAccumulator accumulator(sgd);
  torch::optim::Optimizer& facade = accumulator;
  static_cast<torch::optim::SGDOptions&>(facade.param_groups()[0].options()).lr(0.3);
  accumulator.step();
  CHECK(sgd.param_groups()[0].options().get_lr() == 0.3);
  static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).lr(0.2);
  accumulator.step();
  CHECK(sgd.param_groups()[0].options().get_lr() == 0.2);
  CHECK(facade.param_groups()[0].options().get_lr() == 0.2);
}

TEST_CASE("facade: zero_grad through it is harmless, a closure is called, a group added to it trains") {
  auto late = torch::zeros({1}, at::kDouble).set_requires_grad(true),
       first = late.detach().clone().set_requires_grad(true);
  torch::optim::SGD sgd({first}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator accumulator(sgd, {.steps = 2});
  torch::optim::Optimizer& facade = accumulator;
  facade.add_param_group(torch::optim::OptimizerParamGroup({late}));
  for (int i = 0; i < 2; ++i) {
    facade.zero_grad();
    auto loss = facade.step([&] {
      auto sum = 2 * first.sum() + 4 * late.sum();
      sum.backward();
      return sum;
    });
    CHECK(loss.item<double>() == 0.0);
  }
  CHECK(first.item<double>() == -2.0);
  CHECK(late.item<double>() == -4.0);
  CHECK(sgd.param_groups().size() == 2);
}

TEST_CASE("facade: what is saved has the learning rate that a scheduler has just set") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.4), other(make_model()->parameters(), 0.9),
      third(make_model()->parameters(), 0.9);
  ga::GradAccumulator accumulator(sgd);
  torch::optim::Optimizer& facade = accumulator;
  torch::optim::StepLR scheduler(accumulator, 1, 0.5);
  scheduler.step();
  scheduler.step();
  std::stringstream through_facade, directly;
  torch::save(facade, through_facade);
  torch::save(accumulator, directly);
  torch::load(other, through_facade);
  torch::load(third, directly);
  CHECK(other.param_groups()[0].options().get_lr() == 0.2);
  CHECK(third.param_groups()[0].options().get_lr() == 0.2);
}

TEST_CASE("facade: save and load are the wrapped optimizer's") {
  const auto data = make_batches({5, 5, 5, 5});
  auto model = make_model();
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(1e-2));
  ga::GradAccumulator accumulator(adamw, {.steps = 2});
  for (auto& batch : data) {
    loss_of(model, batch).backward();
    accumulator.step();
    accumulator.zero_grad();
  }
  torch::optim::Optimizer& facade = accumulator;
  std::stringstream file;
  torch::save(facade, file);
  auto other = make_model();
  torch::optim::AdamW restored(other->parameters(), torch::optim::AdamWOptions(0.5));
  ga::GradAccumulator around(restored, {.steps = 2});
  torch::load(static_cast<torch::optim::Optimizer&>(around), file);
  CHECK(static_cast<torch::optim::AdamWParamState&>(*restored.state().begin()->second).step() == 2);
  CHECK(restored.param_groups()[0].options().get_lr() == 1e-2);
  around.step();  // and the facade does not bring the old rate back
  CHECK(restored.param_groups()[0].options().get_lr() == 1e-2);
}

TEST_CASE("facade: around an optimizer of the user's own, whose options tell no learning rate") {
  struct Options : torch::optim::OptimizerCloneableOptions<Options> {};
  struct Own : torch::optim::Optimizer {
    explicit Own(std::vector<at::Tensor> p)
        : Optimizer({torch::optim::OptimizerParamGroup(p)}, std::make_unique<Options>()) {}
    at::Tensor step(LossClosure = nullptr) override {
      at::NoGradGuard no_grad;
      for (auto& p : param_groups()[0].params()) p.sub_(p.grad());
      return {};
    }
  };
  auto parameter = torch::zeros({1}).set_requires_grad(true);
  Own own({parameter});
  ga::GradAccumulator accumulator(own, {.steps = 2});
  torch::optim::Optimizer& facade = accumulator;
  for (int i = 0; i < 2; ++i) {
    (parameter * 3).sum().backward();
    facade.step();
  }
  CHECK(parameter.item<float>() == -3.0f);
}
