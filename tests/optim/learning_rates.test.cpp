// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/policies/schedule.hpp>
#include <gradaccum/trainer.hpp>

#include "support/models.hpp"

#include <limits>

namespace ga = gradaccum;
using torch::optim::SGD, torch::optim::SGDOptions;

namespace {

at::Tensor parameter() { return torch::zeros({2}).set_requires_grad(true); }

/// SGD with a group for each rate.
std::unique_ptr<SGD> sgd_with(const std::vector<double>& rates) {
  auto sgd = std::make_unique<SGD>(std::vector<at::Tensor>{parameter()}, SGDOptions(rates.at(0)));
  for (std::size_t i = 1; i < rates.size(); ++i) {
    sgd->add_param_group({{parameter()}});
    sgd->param_groups()[i].options().set_lr(rates[i]);  // explicit, also if it equals LibTorch's default
  }
  return sgd;
}

std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

using Rates = std::vector<double>;

}  // namespace

TEST_CASE("LearningRates: one group, or equal ones, get the rate bit for bit") {
  for (auto& before : {Rates{0.3}, Rates{0.3, 0.3, 0.3}, Rates{0, 0}}) {
    const auto sgd = sgd_with(before);
    ga::LearningRates rates(*sgd);
    CHECK(rates_of(*sgd) == before);
    for (double rate : {0.1, 1.0 / 3, 1e-300, 0.0, 5.0}) {
      rates.set(rate);
      CHECK(rates_of(*sgd) == Rates(before.size(), rate));
      CHECK(rates.current() == rate);
    }
  }
}

TEST_CASE("LearningRates: groups keep their ratios, also through a rate of 0") {
  const auto sgd = sgd_with({0.5, 0.125, 0, 2});
  ga::LearningRates rates(*sgd);
  for (double rate : {0.3, 0.0, 0.7}) {
    rates.set(rate);
    CHECK(rates_of(*sgd) == Rates{rate, rate * 0.25, 0, rate * 4});
  }
}

TEST_CASE("LearningRates: accepts an accumulator, and optimizers behind references") {
  const auto sgd = sgd_with({0.5, 0.125});
  ga::GradAccumulator accumulator(*sgd, {.steps = 2});
  torch::optim::Optimizer& facade = accumulator;
  ga::LearningRates of_wrapped(*sgd), of_accumulator(accumulator), of_facade(facade);
  of_accumulator.set(0.4);
  CHECK(rates_of(*sgd) == Rates{0.4, 0.1});
  of_facade.set(0.8);
  accumulator.step();  // a change through the reference reaches the wrapped optimizer with the next call
  CHECK(rates_of(*sgd) == Rates{0.8, 0.2});
  CHECK(of_accumulator.current() == 0.8);
  of_wrapped.set(0.6);
  CHECK(of_accumulator.current() == 0.6);
  torch::optim::LBFGS lbfgs({parameter()}, torch::optim::LBFGSOptions(1));
  ga::LearningRates(lbfgs).set(0.5);
  CHECK(rates_of(lbfgs) == Rates{0.5});
}

TEST_CASE("LearningRates: a group that is added later counts as if it had existed before") {
  const auto sgd = sgd_with({0.5});
  ga::LearningRates rates(*sgd);
  rates.set(0.05);
  sgd->add_param_group({{parameter()}});  // LibTorch gives it the rate of the optimizer's options, 0.5
  sgd->add_param_group({{parameter()}, std::make_unique<SGDOptions>(0.25)});
  CHECK(rates_of(*sgd) == Rates{0.05, 0.5, 0.25});
  rates.set(0.1);
  CHECK(rates_of(*sgd) == Rates{0.1, 0.1, 0.05});
  sgd->param_groups().pop_back();
  rates.set(0.2);
  CHECK(rates_of(*sgd) == Rates{0.2, 0.2});
  sgd->add_param_group({{parameter()}, std::make_unique<SGDOptions>(2.0)});
  rates.set(0.1);
  CHECK(rates_of(*sgd) == Rates{0.1, 0.1, 0.4});
}

TEST_CASE("LearningRates: a state has the ratios of groups that were added later") {
  const auto with_later_group = [](ga::Archive& archive, bool has_state) {
    const auto sgd = sgd_with({0.5});
    ga::LearningRates rates(*sgd);
    rates.set(0.05);
    sgd->add_param_group({{parameter()}, std::make_unique<SGDOptions>(0.25)});
    if (archive.loading()) sgd->param_groups()[1].options().set_lr(0.025);  // as it was when the state was saved
    if (has_state) archive("rates", rates);
    rates.set(0.1);
    return rates_of(*sgd);
  };
  ga::Archive saved;
  CHECK(with_later_group(saved, true) == Rates{0.1, 0.05});
  ga::Archive loading(saved.values());
  CHECK(with_later_group(loading, true) == Rates{0.1, 0.05});
  CHECK(with_later_group(loading, false)[1] == Approx(0.005));

  const auto sgd = sgd_with({0.5, 1});  // whose ratio is the program's
  ga::LearningRates rates(*sgd);
  ga::Archive(saved.values())("rates", rates);
  rates.set(0.1);
  CHECK(rates_of(*sgd) == Rates{0.1, 0.2});
}

TEST_CASE("LearningRates: invalid rates change nothing") {
  const auto sgd = sgd_with({0.5, 1});
  ga::LearningRates rates(*sgd);
  const double infinity = std::numeric_limits<double>::infinity();
  REQUIRE_ERROR("LearningRates: a rate must be finite and >= 0, got -0.1", rates.set(-0.1));
  REQUIRE_ERROR("must be finite and >= 0, got inf", rates.set(infinity));
  REQUIRE_ERROR("must be finite and >= 0, got nan", rates.set(std::numeric_limits<double>::quiet_NaN()));
  REQUIRE_ERROR("LearningRates: a group's rate must be finite, got 1e+308 * 2", rates.set(1e308));
  CHECK(rates_of(*sgd) == Rates{0.5, 1});
  sgd->add_param_group({{parameter()}});
  sgd->param_groups()[2].options().set_lr(infinity);
  REQUIRE_ERROR("LearningRates: a group's rate must be finite and >= 0, got inf", rates.set(0.1));
  CHECK(rates_of(*sgd) == Rates{0.5, 1, infinity});
}

TEST_CASE("LearningRates: refuses unsupported optimizers") {
  REQUIRE_ERROR("LearningRates: the first group's rate must be > 0 if another's is, got 0 and 0.1",
                ga::LearningRates(*sgd_with({0, 0.1})));
  SGD without_groups(std::vector<torch::optim::OptimizerParamGroup>(), SGDOptions(0.1));
  REQUIRE_ERROR("LearningRates: the optimizer must have a parameter group", ga::LearningRates(without_groups));
  struct TellsNothing : torch::optim::OptimizerCloneableOptions<TellsNothing> {};
  struct TellsOnly : torch::optim::OptimizerCloneableOptions<TellsOnly> {
    double get_lr() const override { return 0.1; }
  };
  struct Plain : torch::optim::Optimizer {
    using Optimizer::Optimizer;
    at::Tensor step(LossClosure = nullptr) override { return {}; }
  };
  Plain tells_nothing({parameter()}, std::make_unique<TellsNothing>());
  REQUIRE_ERROR("LearningRates: TellsNothing must override get_lr() and set_lr()", ga::LearningRates(tells_nothing));
  Plain tells_only({parameter()}, std::make_unique<TellsOnly>());
  REQUIRE_ERROR("LearningRates: TellsOnly must override get_lr() and set_lr()", ga::LearningRates(tells_only));
}

namespace {

/// Trains the optimizer's parameters, which no module has.
const auto mean_of_parameters = [](auto&, const std::vector<at::Tensor>& parameters) {
  at::Tensor sum = torch::zeros({});
  for (auto& one : parameters) sum = sum + one.sum();
  return ga::Loss(sum, 1);
};

std::vector<at::Tensor> parameters_of(SGD& sgd) {
  std::vector<at::Tensor> all;
  for (auto& group : sgd.param_groups()) all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

}  // namespace

TEST_CASE("Schedule: each update has the rate of its index") {
  const ga::lr::Cosine cosine{.peak = 0.1, .warmup = 3, .total = 10};
  const auto sgd = sgd_with({0.5, 0.25});
  torch::nn::Module none;
  ga::Trainer trainer(none, *sgd, mean_of_parameters, ga::Schedule{cosine});
  const auto batch = parameters_of(*sgd);
  for (std::int64_t update = 0; update < 12; ++update) {
    CHECK(rates_of(*sgd) == Rates{cosine(update), cosine(update) * 0.5});
    trainer.step(batch);
  }
}

TEST_CASE("Schedule: accepts any function") {
  const auto sgd = sgd_with({0.5});
  torch::nn::Module none;
  ga::Schedule inverse{[](std::int64_t update) { return 1.0 / static_cast<double>(1 + update); }};
  static_assert(ga::policy<decltype(inverse)>);
  ga::Trainer trainer(none, *sgd, mean_of_parameters, inverse);
  const auto batch = parameters_of(*sgd);
  for (int i = 0; i < 4; ++i) trainer.step(batch);
  CHECK(rates_of(*sgd) == Rates{0.2});
}

TEST_CASE("Schedule: loading sets the rate of the loaded count, with the earlier ratios") {
  struct Pair : torch::nn::Module {
    at::Tensor a = register_parameter("a", torch::zeros({2})), b = register_parameter("b", torch::zeros({2}));
  } pair;
  SGD sgd({pair.a}, SGDOptions(0.5));
  sgd.add_param_group({{pair.b}});
  sgd.param_groups()[1].options().set_lr(0.25);
  ga::Trainer trainer(pair, sgd, mean_of_parameters,
                      ga::Schedule{[](std::int64_t update) { return 1.0 / static_cast<double>(1 + update); }});
  const auto batch = parameters_of(sgd);
  for (int i = 0; i < 3; ++i) trainer.step(batch);
  CHECK(rates_of(sgd) == Rates{0.25, 0.125});
  ga::Archive saved;
  trainer.state(saved);
  CHECK(saved.values().contains("schedule.updates"));  // so that loading calls state()
  trainer.step(batch);
  for (auto& group : sgd.param_groups()) group.options().set_lr(0);  // as in a file of another schedule
  ga::Archive loaded(saved.values());
  trainer.state(loaded);
  CHECK(rates_of(sgd) == Rates{0.25, 0.125});
}
