// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adafactor.hpp>

#include "support/models.hpp"

#include <sstream>
#include <type_traits>

// The accumulator works in programs that are written as PyTorch's C++ examples: a `Net model;` by value, functions that
// take a `torch::optim::Optimizer&`, LibTorch's schedulers, torch::save and torch::load.

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

// Trains as in pytorch/examples, without code for windows.
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
  CHECK_FALSE(accumulated.parameters()[0].grad().defined());  // cleared by step, because zero_grad is not virtual
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

TEST_CASE("facade: the last change of the learning rate counts") {
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

TEST_CASE("facade: zero_grad through it has no effect in a window, a closure is called, and an added group trains") {
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

TEST_CASE("facade: it lists the parameters, and clearing their gradients through it keeps the window") {
  const auto data = make_batches(std::vector<std::int64_t>(8, 5));
  auto large = make_model(), by_itself = make_model();
  using Options = torch::optim::AdamOptions;
  torch::optim::Adam plain(large->parameters(), Options(1e-2)), direct(by_itself->parameters(), Options(1e-2));
  for (auto& batch : in_windows(data, 4)) {
    plain.zero_grad();
    loss_of(large, batch).backward();
    plain.step();
  }
  ga::GradAccumulator windows(direct, {.steps = 4});
  for (auto& batch : data) {
    loss_of(by_itself, batch).backward();
    windows.step();
    windows.zero_grad();
  }
  const bool to_none = GENERATE(true, false);
  const bool from_the_middle = GENERATE(false, true);
  auto model = make_model();
  torch::optim::Adam adam(model->parameters(), Options(1e-2));
  ga::GradAccumulator accumulator(adam, {.steps = 4});
  std::size_t first = 0;
  if (from_the_middle) {
    for (; first < 2; ++first) {
      loss_of(model, data[first]).backward();
      accumulator.step();
    }
  }
  torch::optim::Optimizer& facade = accumulator;
  CHECK(facade.param_groups()[0].params().size() == 4);
  CHECK(facade.parameters()[0].is_same(model->parameters()[0]));
  CHECK(facade.size() == 4);
  for (std::size_t i = first; i < data.size(); ++i) {
    facade.zero_grad(to_none);
    loss_of(model, data[i]).backward();
    facade.step();
  }
  CHECK(accumulator.updates() == 2);
  CHECK(distance(model, large) < 1e-12);
  CHECK(torch::equal(flat(model), flat(by_itself)));
}

TEST_CASE("facade: options set through it reach the wrapped optimizer, and the reverse") {
  auto parameter = torch::zeros({8, 8}).set_requires_grad(true);
  const auto check = [&](auto optimizer, auto set, auto get) {
    ga::GradAccumulator accumulator(optimizer);
    torch::optim::Optimizer& facade = accumulator;
    auto& options = optimizer.param_groups()[0].options();
    using Options = std::remove_cvref_t<decltype(options)>;
    const auto before = get(options);
    set(facade.param_groups()[0].options(), 0.25);
    static_cast<torch::optim::Optimizer&>(accumulator).parameters();  // any use of the accumulator
    CHECK(get(optimizer.param_groups()[0].options()) == 0.25);
    CHECK(before != 0.25);
    Options& theirs = optimizer.param_groups()[0].options();
    set(theirs, 0.125);
    accumulator.step();
    CHECK(get(optimizer.param_groups()[0].options()) == 0.125);
    CHECK(get(facade.param_groups()[0].options()) == 0.125);
  };
  using torch::optim::OptimizerOptions;
  const std::vector<at::Tensor> list{parameter};
  check(
      torch::optim::SGD(list, 0.1),
      [](OptimizerOptions& o, double v) { static_cast<torch::optim::SGDOptions&>(o).momentum(v); },
      [](OptimizerOptions& o) { return static_cast<torch::optim::SGDOptions&>(o).momentum(); });
  check(
      torch::optim::AdamW(list, 0.1),
      [](OptimizerOptions& o, double v) { static_cast<torch::optim::AdamWOptions&>(o).weight_decay(v); },
      [](OptimizerOptions& o) { return static_cast<torch::optim::AdamWOptions&>(o).weight_decay(); });
  check(
      torch::optim::Adam(list, 0.1),
      [](OptimizerOptions& o, double v) {
        static_cast<torch::optim::AdamOptions&>(o).betas({v, 0.5});
      },
      [](OptimizerOptions& o) { return std::get<0>(static_cast<torch::optim::AdamOptions&>(o).betas()); });
  check(
      torch::optim::RMSprop(list, 0.1),
      [](OptimizerOptions& o, double v) { static_cast<torch::optim::RMSpropOptions&>(o).alpha(v); },
      [](OptimizerOptions& o) { return static_cast<torch::optim::RMSpropOptions&>(o).alpha(); });
  check(
      torch::optim::Adagrad(list, 0.1),
      [](OptimizerOptions& o, double v) { static_cast<torch::optim::AdagradOptions&>(o).eps(v); },
      [](OptimizerOptions& o) { return static_cast<torch::optim::AdagradOptions&>(o).eps(); });
  check(
      ga::optim::Adafactor(list),
      [](OptimizerOptions& o, double v) { static_cast<ga::optim::AdafactorOptions&>(o).weight_decay(v); },
      [](OptimizerOptions& o) { return static_cast<ga::optim::AdafactorOptions&>(o).weight_decay(); });
}

TEST_CASE("facade: changing parameters through it is refused") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.4);
  ga::GradAccumulator accumulator(sgd, {.steps = 2});
  torch::optim::Optimizer& facade = accumulator;
  facade.param_groups()[0].params().pop_back();
  REQUIRE_ERROR("the parameters of group 0 were changed through a torch::optim::Optimizer&", accumulator.step());
  CHECK(sgd.param_groups()[0].params().size() == 4);
}

TEST_CASE("facade: saving in the middle of a window is refused, in both ways") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.4);
  ga::GradAccumulator accumulator(sgd, {.steps = 2});
  torch::optim::Optimizer& facade = accumulator;
  loss_of(model, make_batches({5})[0]).backward();
  accumulator.step();
  std::stringstream file;
  REQUIRE_ERROR("there are 1 micro-batches in the open window; save after flush()", torch::save(accumulator, file));
  REQUIRE_ERROR("there are 1 micro-batches in the open window; save after flush()", torch::save(facade, file));
  accumulator.flush();
  torch::save(accumulator, file);
  torch::save(facade, file);
}

TEST_CASE("facade: saves the learning rate that a scheduler has just set") {
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

TEST_CASE("facade: save and load use the wrapped optimizer's state") {
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
  around.step();  // does not restore the old rate
  CHECK(restored.param_groups()[0].options().get_lr() == 1e-2);
}

TEST_CASE("facade: around a user's optimizer, whose options have no learning rate") {
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
