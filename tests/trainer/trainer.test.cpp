// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/trainer.hpp>

#include "support/device.hpp"
#include "support/files.hpp"
#include "support/models.hpp"
#include "support/warnings.hpp"

#include <cmath>
#include <limits>
#include <list>
#include <optional>
#include <sstream>
#include <utility>

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

const auto mean_of_batch = [](auto& net, auto& batch) { return loss_of(net, batch); };
const auto weighted = [](auto& net, auto& batch) { return ga::Loss{loss_of(net, batch), batch.target.numel()}; };

bool same_bits(const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); }

// A model, and Adam, whose state also depends on the number of steps.
struct Run {
  torch::nn::Sequential model;
  ga::optim::AdamW adamw;
  explicit Run(at::ScalarType dtype = at::kFloat)
      : model(make_model(dtype)), adamw(model->parameters(), ga::optim::AdamWOptions(0.01).weight_decay(0.1)) {}
};

// A parameter, an optimizer with lr 1 that shows the gradient, and losses whose gradient is the batch.
struct Probe : torch::nn::Module {
  at::Tensor parameter = register_parameter("parameter", torch::zeros({2}, at::kDouble));
  torch::optim::SGD sgd{{parameter}, torch::optim::SGDOptions(1.0)};
  double moved() const { return -parameter[0].item<double>(); }
};
const auto slope = [](Probe& probe, double slope) { return (probe.parameter * slope).sum(); };

/// Returns the only warning of a fit, from its epoch on; empty if there is none.
std::string warnings_of_fit(auto& trainer, const std::vector<double>& batches, const ga::FitOptions& options = {}) {
  const testing::Warnings warnings;
  trainer.fit(batches, options);
  REQUIRE(warnings.texts().size() <= 1);
  return warnings.texts().empty() ? "" : warnings.texts().front().substr(warnings.texts().front().find("made"));
}

}  // namespace

TEST_CASE("Trainer: trains bitwise the parameters of the same loop by hand") {
  const auto batches = make_batches({5, 5, 5, 5, 5, 5, 5}, at::kFloat);  // two windows of 3, and a tail of 1
  Run by_hand, trained, other;
  ga::GradAccumulator optimizer(by_hand.adamw, {.steps = 3});
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (auto& batch : batches) {
      loss_of(by_hand.model, batch).backward();
      optimizer.clip_grad_norm_(0.5);
      optimizer.step();
      optimizer.zero_grad();
    }
    optimizer.flush();
  }
  ga::Trainer trainer(trained.model, trained.adamw, mean_of_batch, ga::Accumulate{.steps = 3},
                      ga::ClipNorm{.max = 0.5});
  const auto report = trainer.fit(batches, {.epochs = 3});
  CHECK(same_bits(flat(trained.model), flat(by_hand.model)));
  CHECK(report.updates == 9);
  CHECK(report.epochs == 3);
  CHECK(report.samples == 105);
  CHECK(report.skipped == 0);
  CHECK(trainer.updates() == 9);

  ga::Trainer unclipped(other.model, other.adamw, mean_of_batch, ga::Accumulate{.steps = 3});
  unclipped.fit(batches, {.epochs = 3});
  CHECK_FALSE(same_bits(flat(other.model), flat(by_hand.model)));
}

TEST_CASE("Trainer: float16, a loss scale, weights, clipping and a schedule match a loop by hand, to the bit") {
  const auto batches = make_batches({5, 2, 7, 4, 1, 6, 3}, at::kFloat);
  const ga::lr::Cosine cosine{.peak = 0.02, .warmup = 2, .total = 12};
  const auto overflows = [](std::size_t i) { return i == 1 || i == 4; };
  Run by_hand, trained;
  ga::GradAccumulator optimizer(by_hand.adamw, {.steps = 2});
  ga::AmpScaler scaler({.init_scale = 1000.0, .growth_interval = 2});  // not a power of two, so that rounding matters
  const auto set_rate = [&] { by_hand.adamw.param_groups()[0].options().set_lr(cosine(optimizer.updates())); };
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (std::size_t i = 0; i < batches.size(); ++i) {
      set_rate();
      auto loss = [&] {
        ga::Autocast autocast(at::kCPU, at::kHalf);
        return loss_of(by_hand.model, batches[i]);
      }();
      if (epoch == 1 && overflows(i)) loss = loss * 1e38;
      optimizer.backward(scaler.scale(ga::Loss{loss, batches[i].target.numel()}));
      optimizer.clip_grad_norm_(0.3);
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
    set_rate();
    optimizer.flush();
    scaler.update();
  }

  std::int64_t seen = 0;
  const auto objective = [&](auto& net, auto& batch) {
    const auto i = static_cast<std::size_t>(seen % 7), epoch = static_cast<std::size_t>(seen / 7);
    ++seen;
    auto loss = loss_of(net, batch);
    return ga::Loss{epoch == 1 && overflows(i) ? loss * 1e38 : loss, batch.target.numel()};
  };
  ga::Trainer trainer(trained.model, trained.adamw, objective, ga::ClipNorm{.max = 0.3}, ga::Schedule{cosine},
                      ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 1000.0, .growth_interval = 2}},
                      ga::Accumulate{.steps = 2});
  const auto report = trainer.fit(batches, {.epochs = 3});
  CHECK(report.skipped == 2);
  CHECK(report.updates == optimizer.updates());
  CHECK(report.updates == 10);
  CHECK(same_bits(flat(trained.model), flat(by_hand.model)));
  CHECK(trainer.policy<ga::MixedPrecision>().amp_scaler().state_dict() == scaler.state_dict());
  CHECK(trainer.policy<ga::MixedPrecision>().amp_scaler().get_scale() != 1000.0);
}

TEST_CASE("Trainer: the order of policies does not change a bit") {
  const auto batches = make_batches({5, 2, 7, 4, 1}, at::kFloat);  // weights: 15, 6, 21, …; none a power of two
  const ga::Accumulate accumulate{.steps = 3};
  const ga::MixedPrecision precision{.dtype = at::kHalf, .scaler = {.init_scale = 1000.0}};
  const ga::ClipNorm clip{.max = 0.3};
  const auto result = [&](auto first, auto second, auto third) {
    Run run;
    ga::Trainer trainer(run.model, run.adamw, weighted, first, second, third);
    trainer.fit(batches, {.epochs = 2});
    return flat(run.model);
  };
  const auto expected = result(accumulate, precision, clip);
  CHECK(same_bits(expected, result(accumulate, clip, precision)));
  CHECK(same_bits(expected, result(precision, accumulate, clip)));
  CHECK(same_bits(expected, result(precision, clip, accumulate)));
  CHECK(same_bits(expected, result(clip, accumulate, precision)));
  CHECK(same_bits(expected, result(clip, precision, accumulate)));
  CHECK_FALSE(same_bits(expected, result(ga::ClipNorm{.max = 0.2}, precision, accumulate)));
}

TEST_CASE("Trainer: ClipValue clips the elements of the mean, unscaled") {
  Probe probe;
  ga::Trainer trainer(
      probe, probe.sgd, [](Probe& net, double value) { return net.parameter[0] * value + net.parameter[1]; },
      ga::Accumulate{.steps = 2}, ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 8.0}},
      ga::ClipValue{.max = 2.5});
  trainer.fit(std::vector<double>{2.0, 6.0});
  CHECK(at::equal(probe.parameter, torch::tensor({-2.5, -1.0}, at::kDouble)));
}

TEST_CASE("Trainer: a window is the mean over all its items, like one large batch") {
  const auto batches = make_batches({5, 2, 7, 4, 1});
  const auto after = [&](const auto& data, auto objective, auto... policies) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(model, sgd, objective, policies...);
    trainer.fit(data);
    return flat(model);
  };
  const std::vector<Example> whole{joined(batches, 0, 5)};
  const auto expected = after(whole, mean_of_batch);
  CHECK(distance(after(batches, weighted, ga::Accumulate{.steps = 5}), expected) < 1e-14);
  CHECK(distance(after(batches, weighted, ga::Accumulate{.steps = 8}), expected) < 1e-14);  // a tail
  CHECK(distance(after(batches, weighted, ga::Accumulate{.batch_size = 19}), expected) < 1e-14);
  CHECK(distance(after(batches, mean_of_batch, ga::Accumulate{.steps = 5}), expected) < 1e-14);  // over its samples
  CHECK(distance(after(batches, mean_of_batch, ga::Accumulate{.batch_size = 19}), expected) < 1e-14);
  const auto unweighted = [](auto& net, auto& batch) { return ga::Loss{loss_of(net, batch)}; };
  CHECK(distance(after(batches, unweighted, ga::Accumulate{.steps = 5}), expected) > 1e-3);  // a mean of means
}

TEST_CASE("Trainer: windows and metrics count the samples of a loss without items") {
  const auto batches = make_batches({8, 8, 8, 1});
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.0);
  std::vector<ga::Step> steps;
  ga::Trainer trainer(model, sgd, mean_of_batch, ga::Accumulate{.batch_size = 25},
                      [&](const ga::Step& step) { steps.push_back(step); });
  trainer.fit(batches);
  const auto whole = loss_of(model, joined(batches, 0, 4)).item<double>();
  REQUIRE(steps.size() == 1);
  CHECK(steps[0].items == 25);
  CHECK(steps[0].loss.item<double>() == Approx(whole).epsilon(1e-14));
  CHECK(trainer.evaluate(batches)["loss"] == Approx(whole).epsilon(1e-14));
}

TEST_CASE("Trainer: the three kinds of model, and all pointers to an optimizer") {
  const auto batches = make_batches({4, 4});
  auto expected = make_model();
  {
    torch::optim::SGD sgd(expected->parameters(), 0.1);
    for (auto& batch : batches) {
      sgd.zero_grad();
      loss_of(expected, batch).backward();
      sgd.step();
    }
  }
  const auto pointer_to = [](auto& net, auto& batch) {
    return torch::mse_loss(net->forward(batch.data), batch.target);
  };
  const auto plain = [](torch::nn::SequentialImpl& net, auto& batch) {
    return torch::mse_loss(net.forward(batch.data), batch.target);
  };

  SECTION("a holder, an optimizer behind the base class") {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.1);
    torch::optim::Optimizer& base = sgd;
    ga::Trainer(model, base, pointer_to).fit(batches);
    CHECK(same_bits(flat(model), flat(expected)));
  }
  SECTION("a shared_ptr, a unique_ptr that is given away") {
    const auto model = make_model().ptr();
    std::unique_ptr<torch::optim::Optimizer> owned = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
    ga::Trainer trainer(model, std::move(owned), pointer_to);
    CHECK(owned == nullptr);
    trainer.fit(batches);
    CHECK(same_bits(flat(model), flat(expected)));
  }
  SECTION("a plain module, a unique_ptr that is kept") {
    auto holder = make_model();
    auto& model = *holder;
    auto owned = std::make_unique<torch::optim::SGD>(model.parameters(), 0.1);
    ga::Trainer trainer(model, owned, plain);
    CHECK(&trainer.module() == &model);
    CHECK(&trainer.optimizer() == owned.get());
    trainer.fit(batches);
    CHECK(same_bits(flat(holder), flat(expected)));
  }
  SECTION("a module on the stack, a shared_ptr whose other owner goes") {
    Probe probe;
    auto shared = std::make_shared<torch::optim::SGD>(probe.parameters(), 1.0);
    ga::Trainer trainer(probe, shared, slope);
    shared.reset();
    trainer.fit(std::vector<double>{2.0, 3.0});
    CHECK(probe.moved() == 5.0);
  }
  SECTION("a raw pointer") {
    Probe probe;
    ga::Trainer trainer(probe, &probe.sgd, slope);
    trainer.fit(std::vector<double>{2.0});
    CHECK(probe.moved() == 2.0);
  }
}

namespace {

// Has the interface of an optimizer, and does not derive from torch::optim::Optimizer.
struct OwnOptimizer {
  struct Group {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor>& params() { return parameters; }
  };
  std::vector<Group> groups;
  int cleared = 0;
  void step() {
    at::NoGradGuard no_grad;
    for (auto& parameter : groups[0].parameters) parameter.sub_(parameter.grad());
  }
  void zero_grad() {
    ++cleared;
    for (auto& parameter : groups[0].parameters) parameter.mutable_grad().reset();
  }
  std::vector<Group>& param_groups() { return groups; }
};

}  // namespace

TEST_CASE("Trainer: a user's optimizer") {
  Probe probe;
  OwnOptimizer own{.groups = {{{probe.parameter}}}};
  double rate = 0;
  ga::Trainer trainer(probe, own, slope, ga::Accumulate{.steps = 2}, [&](const ga::Step& step) { rate = step.lr; });
  trainer.fit(std::list<double>{1.0, 3.0, 6.0});
  CHECK(probe.moved() == 2.0 + 6.0);
  CHECK(std::isnan(rate));
  CHECK(own.cleared == 2);
}

TEST_CASE("Trainer: batches of any type, and of any range") {
  Probe probe;
  SECTION("torch::data loader") {
    auto x = torch::arange(10, at::kDouble).reshape({10, 1});
    auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
        torch::data::datasets::TensorDataset(x).map(torch::data::transforms::Stack<torch::data::TensorExample>()),
        torch::data::DataLoaderOptions(4));
    ga::Trainer trainer(
        probe, probe.sgd,
        [](Probe& net, torch::data::TensorExample& batch) {
          return ga::Loss{(net.parameter[0] * batch.data).mean(), batch.data.size(0)};
        },
        ga::Accumulate{.steps = 3});
    const auto report = trainer.fit(*loader, {.epochs = 2});
    CHECK(probe.moved() == Approx(9.0).epsilon(1e-14));  // the mean of 0 … 9, twice
    CHECK(report.samples == 20);
    CHECK(report.updates == 2);
  }
  SECTION("a loader without Stack: a batch is a vector") {
    auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
        torch::data::datasets::TensorDataset(torch::ones({5}, at::kDouble)), torch::data::DataLoaderOptions(2));
    ga::Trainer trainer(probe, probe.sgd, [](Probe& net, std::vector<torch::data::TensorExample>& batch) {
      return (net.parameter[0] * static_cast<double>(batch.size()));
    });
    CHECK(trainer.fit(*loader).samples == 5);
    CHECK(probe.moved() == 5.0);
  }
  SECTION("a constant vector of pairs, and an objective that takes them by value") {
    const std::vector<std::pair<double, int>> batches{{1.0, 2}, {2.0, 4}};
    ga::Trainer trainer(
        probe, probe.sgd,
        [](Probe& net, std::pair<double, int> batch) {
          return ga::Loss{net.parameter[0] * batch.first, batch.second};
        },
        ga::Accumulate{.steps = 2});
    trainer.fit(batches);
    CHECK(probe.moved() == Approx(10.0 / 6).epsilon(1e-14));
  }
  SECTION("nothing but an array") {
    double batches[] = {1.0, 2.0};
    ga::Trainer trainer(probe, probe.sgd, slope);
    CHECK(trainer.fit(batches).updates == 2);
  }
}

TEST_CASE("Trainer: an empty loader trains nothing, and prints a warning") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2});
  const std::vector<double> none;
  const testing::Warnings warnings;
  const auto report = trainer.fit(none, {.epochs = 3});
  CHECK(warnings.texts() ==
        std::vector<std::string>{"Trainer: epoch 0 (counted from 0) made no update: the batches are empty"});
  CHECK(report.epochs == 3);
  CHECK(report.updates + report.samples + report.skipped == 0);
  CHECK(probe.moved() == 0.0);
  REQUIRE_ERROR("fit must make 5 updates, but epoch 3 (counted from 0) made none", trainer.fit(none, {.updates = 5}));
  const auto evaluation = trainer.evaluate(none);
  CHECK(std::isnan(evaluation["loss"]));
  CHECK(evaluation.samples == 0);
  std::ostringstream text;
  text << evaluation << '\n'
       << ga::Validation{.name = "test", .update = 3, .found = {.metrics = {{"loss", 0.5}}, .samples = 2}};
  CHECK(text.str() == "loss: nan (of no samples)\ntest at update 3: loss: 0.500000");
}

TEST_CASE("Trainer: batches without updates do not loop forever") {
  Probe probe;
  const std::vector<double> batches{1.0, 2.0};
  SECTION("losses without items") {
    ga::Trainer trainer(probe, probe.sgd, [](Probe& net, double) {
      return ga::Loss{net.parameter.sum() * not_a_number, 0};
    });
    REQUIRE_ERROR("made none: all losses are of 0 items", trainer.fit(batches, {.updates = 1}));
    CHECK(warnings_of_fit(trainer, batches) == "made no update: all losses are of 0 items");
  }
  SECTION("every loss is NaN") {
    ga::Trainer trainer(probe, probe.sgd, [](Probe& net, double) { return net.parameter.sum() * not_a_number; });
    REQUIRE_ERROR("fit must make 1 updates, but epoch 0 (counted from 0) made none: losses or gradients were NaN",
                  trainer.fit(batches, {.updates = 1, .on_nan = ga::OnNan::skip}));
    CHECK(warnings_of_fit(trainer, batches, {.on_nan = ga::OnNan::skip}) == "");  // the report says so
  }
  SECTION("a window that is never full, and dropped") {
    ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 3});
    REQUIRE_ERROR("it is shorter than a window", trainer.fit(batches, {.updates = 1, .tail = ga::Tail::drop}));
    CHECK(warnings_of_fit(trainer, batches, {.epochs = 2, .tail = ga::Tail::drop}) ==
          "made no update: it is shorter than a window, and .tail = ga::Tail::drop drops it");
    CHECK(warnings_of_fit(trainer, batches, {.updates = 1, .tail = ga::Tail::carry}) == "");
    CHECK(trainer.updates() == 1);
  }
}

TEST_CASE("Trainer: epochs or updates end a fit, whichever comes first") {
  const std::vector<double> batches{1.0, 1.0, 1.0, 1.0, 1.0};
  Probe probe;
  std::vector<std::int64_t> updates, epochs;
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2}, [&](const ga::Step& step) {
    updates.push_back(step.update);
    epochs.push_back(step.epoch);
  });
  SECTION("epochs") {
    CHECK(trainer.fit(batches).updates == 3);
    CHECK(updates == std::vector<std::int64_t>{1, 2, 3});
  }
  SECTION("updates, in the middle of an epoch") {
    const auto report = trainer.fit(batches, {.updates = 4});
    CHECK(report.updates == 4);
    CHECK(report.samples == 7);
    CHECK(epochs == std::vector<std::int64_t>{0, 0, 0, 1});
    CHECK(probe.moved() == 4.0);
  }
  SECTION("both") {
    CHECK(trainer.fit(batches, {.epochs = 1, .updates = 4}).updates == 3);
    CHECK(trainer.fit(batches, {.epochs = 9, .updates = 4}).updates == 4);
  }
  SECTION("none of it") {
    CHECK(trainer.fit(batches, {.epochs = 0}).updates == 0);
    CHECK(trainer.fit(batches, {.updates = 0}).samples == 0);
    CHECK(probe.moved() == 0.0);
  }
  SECTION("a second fit goes on counting") {
    trainer.fit(batches);
    trainer.fit(batches);
    CHECK(updates == std::vector<std::int64_t>{1, 2, 3, 4, 5, 6});
    CHECK(epochs == std::vector<std::int64_t>{0, 0, 0, 1, 1, 1});
  }
  REQUIRE_ERROR("FitOptions: epochs must be >= 0, got -1", trainer.fit(batches, {.epochs = -1}));
  REQUIRE_ERROR("FitOptions: updates must be >= 0, got -2", trainer.fit(batches, {.updates = -2}));
}

TEST_CASE("Trainer: the last, shorter window is flushed, dropped or carried over") {
  const std::vector<double> batches{1.0, 3.0, 5.0};
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2});
  SECTION("flush") {
    CHECK(trainer.fit(batches, {.tail = ga::Tail::flush}).updates == 2);
    CHECK(probe.moved() == 2.0 + 5.0);
  }
  SECTION("drop") {
    CHECK(trainer.fit(batches, {.epochs = 2, .tail = ga::Tail::drop}).updates == 2);
    CHECK(probe.moved() == 2.0 + 2.0);
    CHECK_FALSE(probe.parameter.grad().defined());
  }
  SECTION("carry: a window is of the epoch that it began in") {
    std::vector<std::int64_t> epochs;
    ga::Trainer tells(probe, probe.sgd, slope, ga::Accumulate{.steps = 2},
                      [&](const ga::Step& step) { epochs.push_back(step.epoch); });
    tells.fit(batches, {.epochs = 2, .tail = ga::Tail::carry});
    CHECK(epochs == std::vector<std::int64_t>{0, 0, 1});
  }
  SECTION("carry: into the next epoch") {
    CHECK(trainer.fit(batches, {.epochs = 2, .tail = ga::Tail::carry}).updates == 3);
    CHECK(probe.moved() == 2.0 + 3.0 + 4.0);
  }
  SECTION("carry: into the next fit, or its owner closes it") {
    CHECK(trainer.fit(batches, {.tail = ga::Tail::carry}).updates == 1);
    CHECK(trainer.window().micro_batches == 1);
    CHECK(trainer.flush());
    CHECK(probe.moved() == 2.0 + 5.0);
    CHECK_FALSE(trainer.flush());
  }
}

TEST_CASE("Trainer: step, flush and discard, for a user's loop") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2});
  CHECK_FALSE(trainer.step(1.0));
  CHECK(trainer.step(3.0));
  CHECK(probe.moved() == 2.0);
  trainer.step(100.0);
  trainer.discard();
  CHECK_FALSE(trainer.flush());
  trainer.step(4.0);
  CHECK(trainer.flush());
  CHECK(probe.moved() == 6.0);
  CHECK(trainer.updates() == 2);
}

TEST_CASE("Trainer: reports the results of a window") {
  Probe probe;
  std::vector<ga::Step> steps;
  const std::vector<std::pair<double, int>> batches{{1.0, 1}, {4.0, 2}, {7.0, 3}};
  ga::Trainer trainer(
      probe, probe.sgd,
      [](Probe& net, auto& batch) {
        return ga::Loss{net.parameter.sum() * batch.first + 10 * batch.first, batch.second};
      },
      ga::Accumulate{.steps = 2}, ga::ClipNorm{.max = 1e6}, [&](const ga::Step& step) { steps.push_back(step); });
  trainer.fit(batches);
  REQUIRE(steps.size() == 2);
  CHECK(steps[0].update == 1);
  CHECK(steps[0].micro_batches == 2);
  CHECK(steps[0].samples == 2);
  CHECK(steps[0].items == 3);
  CHECK(steps[0].moved);
  CHECK_FALSE(steps[0].overflowed);
  CHECK(steps[0].loss.item<double>() == Approx((10.0 + 2 * 40.0) / 3).epsilon(1e-14));
  CHECK_FALSE(steps[0].loss.requires_grad());
  CHECK(steps[0].grad_norm.item<double>() == Approx(3.0 * std::sqrt(2.0)).epsilon(1e-12));  // (1 + 2 · 4) / 3, twice
  CHECK(steps[0].lr == 1.0);
  CHECK(steps[1].items == 3);
  CHECK(steps[1].micro_batches == 1);
  CHECK(steps[1].loss.item<double>() == Approx(70.0 - 2 * 3 * 7.0).epsilon(1e-14));  // of this window only
}

namespace {

struct Watch {
  std::vector<bool> seen = {};
  std::function<bool()> closing = {};
  void attach(auto& trainer) {
    closing = [&trainer] { return trainer.closing(); };
  }
  void after_backward(ga::Gradients& so_far) {
    seen.push_back(closing());
    CHECK_FALSE(so_far.closed());
  }
  void after_window(const ga::Step&) { CHECK_FALSE(closing()); }
};

}  // namespace

TEST_CASE("Trainer: closing() is true in the backward that fills the window") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope, Watch{}, ga::Accumulate{.steps = 2});
  trainer.fit(std::vector<double>{1.0, 1.0, 1.0, 1.0, 1.0});
  CHECK(trainer.policy<Watch>().seen == std::vector<bool>{false, true, false, true, false});
  CHECK_FALSE(trainer.closing());
}

TEST_CASE("Trainer: stop() ends a fit after the current micro-batch, and its tail") {
  Probe probe;
  std::function<void()> stop;
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2}, [&](const ga::Step& step) {
    if (step.update == 2) stop();
  });
  stop = [&] { trainer.stop(); };
  stop();  // does nothing outside of fit
  const auto report = trainer.fit(std::vector<double>(9, 1.0), {.epochs = 5});
  CHECK(report.updates == 2);
  CHECK(report.samples == 4);
  CHECK(trainer.fit(std::vector<double>(9, 1.0)).updates == 5);

  struct StopsInside {
    std::function<void()>* stop;
    int seen = 0;
    void before_backward(ga::Loss&) {
      if (++seen == 3) (*stop)();
    }
  };
  ga::Trainer inside(probe, probe.sgd, slope, ga::Accumulate{.steps = 2}, StopsInside{&stop});
  stop = [&] { inside.stop(); };
  CHECK(inside.fit(std::vector<double>(9, 1.0)).updates == 2);  // 2 + 1
}

TEST_CASE("Trainer: policies can read the open window's items before it closes") {
  struct UntilItems {
    double items;
    const ga::Step* window = nullptr;
    bool ready() const { return window->items >= items; }
  };
  Probe probe;
  std::vector<double> items;
  const std::vector<std::pair<double, int>> batches{{1, 3}, {1, 4}, {1, 5}, {not_a_number, 9}, {1, 2}, {1, 9}};
  UntilItems policy{.items = 10};
  ga::Trainer trainer(
      probe, probe.sgd,
      [](Probe& net, auto& batch) {
        return ga::Loss{net.parameter.sum() + batch.first, batch.second};
      },
      policy, [&](const ga::Step& step) { items.push_back(step.items); });
  trainer.policy<UntilItems>().window = &trainer.window();
  trainer.fit(batches, {.on_nan = ga::OnNan::skip});
  CHECK(items == std::vector<double>{12, 11});
}

TEST_CASE("Trainer: the window closes if no policy objects") {
  struct EveryThird {
    int asked = 0;
    bool ready() { return ++asked % 3 == 0; }
  };
  Probe probe;
  const std::vector<double> batches(6, 1.0);
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2}, EveryThird{});
  CHECK(trainer.fit(batches).updates == 2);
  ga::Trainer other_order(probe, probe.sgd, slope, EveryThird{}, ga::Accumulate{.steps = 2});
  CHECK(other_order.fit(batches).updates == 2);  // all policies are asked
}

TEST_CASE("Trainer: a policy must not read the values of an open window") {
  struct Peeks {
    void after_backward(ga::Gradients& so_far) { so_far.values(); }
  };
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope, Peeks{}, ga::Accumulate{.steps = 2});
  REQUIRE_ERROR("inside a window would mix multiplied sums with those to come", trainer.step(1.0));
}

TEST_CASE("Trainer: a NaN loss is an error with its position, before the parameters change") {
  const auto bad = GENERATE(as<double>(), not_a_number, std::numeric_limits<double>::infinity());
  Probe probe;
  ga::Trainer with_offset(
      probe, probe.sgd, [](Probe& net, double value) { return net.parameter.sum() + value; },
      ga::Accumulate{.steps = 2});
  const std::vector<double> batches{0.0, 1.0, 0.0, bad, 0.0};
  REQUIRE_ERROR("for batch 3 of epoch 0 (both counted from 0), in update 2", with_offset.fit(batches));
  CHECK(probe.moved() == 1.0);
  CHECK(with_offset.updates() == 1);
  CHECK(with_offset.window().micro_batches == 0);
  CHECK_FALSE(probe.parameter.grad().defined());

  const auto report = with_offset.fit(batches, {.on_nan = ga::OnNan::skip});
  CHECK(report.nan_batches == 1);
  CHECK(report.first_nan == "batch 3 of epoch 1 (both counted from 0), in update 3");
  CHECK(report.updates == 3);
  CHECK(probe.moved() == 4.0);  // each window is the mean of the remaining batches
  std::ostringstream text;
  text << report;
  CHECK(contains(text.str(), "left out for a loss or gradient of NaN or infinity: 1, the first: batch 3 of epoch 1"));

  CHECK(with_offset.fit(batches, {.on_nan = ga::OnNan::ignore}).updates == 3);
  const auto twice = with_offset.fit(std::vector<double>{0.0, bad, 0.0, bad}, {.on_nan = ga::OnNan::skip});
  CHECK(twice.nan_batches == 2);
  CHECK(contains(twice.first_nan, "batch 1 of epoch 3"));
}

TEST_CASE("Trainer: NaN gradients count in the window if NaN losses are ignored") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope);
  trainer.fit(std::vector<double>{not_a_number}, {.on_nan = ga::OnNan::ignore});
  CHECK(std::isnan(probe.moved()));
}

TEST_CASE("Trainer: a mean over no items may be NaN") {
  Probe probe;
  ga::Trainer trainer(
      probe, probe.sgd,
      [](Probe& net, double value) {
        return ga::Loss{net.parameter.sum() * value, std::isnan(value) ? 0 : 1};
      },
      ga::Accumulate{.steps = 3});
  CHECK(trainer.fit(std::vector<double>{2.0, not_a_number, 4.0}).nan_batches == 0);
  CHECK(probe.moved() == 3.0);
}

TEST_CASE("Trainer: evaluates in evaluation mode, without gradients, weighted by items") {
  struct Net : torch::nn::Module {
    at::Tensor parameter = register_parameter("parameter", torch::ones({1}, at::kDouble));
    bool saw_training = false, saw_grad = false;
  } net;
  torch::optim::SGD sgd(net.parameters(), 0.1);
  ga::Trainer trainer(net, sgd, [](Net& net, auto& batch) {
    net.saw_training = net.is_training();
    net.saw_grad = at::GradMode::is_enabled();
    const auto logits = net.parameter * batch.data;
    return ga::Loss{torch::cross_entropy_loss(logits, batch.target), batch.target.size(0)}.with(logits, batch.target);
  });
  const auto logits = torch::tensor({{2.0, 1.0, 0.0}, {0.0, 3.0, 1.0}, {1.0, 0.0, 4.0}, {1.0, 0.5, 0.0}}, at::kDouble);
  const auto target = torch::tensor({0, 1, 0, 1});
  ga::data::TensorBatches batches(logits, target, {.batch_size = 3});
  const auto result = trainer.evaluate(batches, ga::Accuracy{});
  CHECK(result["accuracy"] == 0.5);
  CHECK(result["loss"] == Approx(torch::cross_entropy_loss(logits, target).item<double>()).epsilon(1e-14));
  CHECK(result.samples == 4);
  CHECK(result.items == 4);
  CHECK_FALSE(net.saw_training);
  CHECK_FALSE(net.saw_grad);
  CHECK(net.is_training());
  CHECK(at::GradMode::is_enabled());
  REQUIRE_ERROR("Evaluation: has no metric 'f1'", result["f1"]);
  trainer.fit(batches);
  CHECK(net.saw_training);
  CHECK(net.saw_grad);
}

TEST_CASE("Trainer: an evaluation inside of fit does not change the training") {
  Probe probe;
  std::vector<bool> modes;
  std::function<void()> evaluate;
  const std::vector<double> batches{1.0, 2.0};
  ga::Trainer trainer(
      probe, probe.sgd,
      [&](Probe& net, double value) {
        modes.push_back(net.is_training());
        return net.parameter.sum() * value;
      },
      [&](const ga::Step&) { evaluate(); });
  evaluate = [&] { trainer.evaluate(batches); };
  trainer.fit(batches);
  CHECK(modes == std::vector<bool>{true, false, false, true, false, false});
}

TEST_CASE("Trainer: a smoke run makes one window of everything") {
  struct Counts {
    int begun = 0, ended = 0, windows = 0;
    void on_epoch_begin(std::int64_t) { ++begun; }
    void on_epoch_end(std::int64_t) { ++ended; }
    void after_window(const ga::Step&) { ++windows; }
  };
  Probe probe;
  int evaluated = 0;
  std::function<void()> evaluate;
  std::vector<double> batches(100, 1.0);
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 3}, Counts{},
                      [&](const ga::Step&) { evaluate(); });
  evaluate = [&] { evaluated += static_cast<int>(trainer.evaluate(batches).samples); };
  const auto report = trainer.fit(batches, {.epochs = 20, .smoke = true});
  CHECK(report.updates == 1);
  CHECK(report.samples == 3);
  CHECK(evaluated == 1);
  auto& counts = trainer.policy<Counts>();
  CHECK(counts.begun == 1);
  CHECK(counts.ended == 1);
  CHECK(counts.windows == 1);
  batches.resize(2);  // fewer than a window
  CHECK(trainer.fit(batches, {.epochs = 20, .tail = ga::Tail::drop, .smoke = true}).updates == 1);
  CHECK(trainer.evaluate(batches).samples == 2);  // no longer a smoke run
}

TEST_CASE("Trainer: parameters that join the optimizer are trained from the next window on") {
  Probe probe;
  auto more = torch::zeros({1}, at::kDouble).set_requires_grad(true);
  ga::Trainer trainer(
      probe, probe.sgd,
      [&](Probe& net, double value) {
        return ga::Loss{((net.parameter + more) * value).sum(), 3};
      },
      ga::Accumulate{.steps = 2});
  trainer.step(1.0);
  trainer.step(5.0);
  CHECK(probe.moved() == 3.0);
  probe.sgd.add_param_group(torch::optim::OptimizerParamGroup({more}));  // it has accumulated gradients so far
  trainer.step(1.0);
  trainer.step(3.0);
  CHECK(more.item<double>() == -4.0);
  CHECK(probe.moved() == 5.0);

  auto late = torch::zeros({1}, at::kDouble).set_requires_grad(true);
  ga::Trainer joins(
      probe, probe.sgd, [&](Probe& net, double value) { return (net.parameter + late).sum() * value; },
      ga::Accumulate{.steps = 8}, ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 64.0}});
  joins.step(1.0);
  joins.step(3.0);
  probe.sgd.add_param_group(torch::optim::OptimizerParamGroup({late}));
  REQUIRE_ERROR("the gradients changed", joins.flush());  // late's gradient may be from before the window
  joins.fit(std::vector<double>{1.0, 3.0});
  CHECK(late.item<double>() == -4.0);
}

TEST_CASE("Trainer: gradients from before a window do not count in it") {
  Probe probe;
  const auto old_gradients = [&] { (probe.parameter.sum() * 100).backward(); };
  old_gradients();
  ga::Trainer trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2});
  trainer.step(1.0);
  trainer.step(1.0);
  CHECK(probe.moved() == 1.0);
  old_gradients();
  trainer.fit(std::vector<double>{2.0});
  CHECK(probe.moved() == 3.0);
  { ga::Trainer(probe, probe.sgd, slope, ga::Accumulate{.steps = 2}).step(50.0); }  // leaves a window open
  trainer.fit(std::vector<double>{2.0});
  CHECK(probe.moved() == 5.0);
}

TEST_CASE("Trainer: two Trainers whose losses reach each other's parameters, as in a GAN") {
  Probe left, right;
  const auto both = [&](Probe&, double value) { return (left.parameter + right.parameter).sum() * value; };
  ga::Trainer first(left, left.sgd, both), second(right, right.sgd, both);
  for (int i = 0; i < 3; ++i) {
    first.step(1.0);
    second.step(10.0);
  }
  CHECK(left.moved() == 3.0);
  CHECK(right.moved() == 30.0);
}

TEST_CASE("Trainer: an optimizer that was made for another model is detected") {
  Probe probe, other;
  ga::Trainer trainer(probe, other.sgd, slope);
  const std::vector<double> batches{1.0, 2.0};
  const std::string why = "the optimizer has none of the model's parameters; was it made for a copy of the model?";
  REQUIRE_ERROR(why, trainer.fit(batches, {.updates = 3}));
  CHECK(warnings_of_fit(trainer, batches) == "made no update: " + why);
  probe.parameter.requires_grad_(false);
  ga::Trainer frozen(probe, probe.sgd,
                     [&](Probe& net, double value) { return (net.parameter + other.parameter).sum() * value; });
  CHECK(
      warnings_of_fit(frozen, batches) ==
      "made no update: no loss gives a gradient to the optimizer's parameters, which are frozen, detached or not used");
  torch::optim::SGD empty(std::vector<at::Tensor>(), 0.1);
  ga::Trainer without(probe, empty, [&](Probe&, double value) { return other.parameter.sum() * value; });
  REQUIRE_ERROR("the optimizer must have parameters to step", without.fit(batches));
}

TEST_CASE("Trainer: a report says that the learning rate was 0, and that there was no state to resume from") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope);
  const std::vector<double> batches{1.0, 2.0};
  CHECK(trainer.fit(batches).notes.empty());
  probe.sgd.param_groups().front().options().set_lr(0);
  const testing::Directory directory;
  const auto report = trainer.fit(batches, {.resume = (directory / "missing").string()});
  CHECK(report.notes == std::vector<std::string>{
                            (directory / "missing").string() + " has no state to resume from, so this fit began anew",
                            "the learning rate was 0 in 2 of 2 updates, which moved nothing"});
  std::ostringstream text;
  text << report;
  CHECK(text.str().find("\nNote: the learning rate was 0") != std::string::npos);
}

TEST_CASE("Trainer: null pointers, a fit inside a fit, a step inside an objective, a range for one pass") {
  Probe probe;
  std::unique_ptr<torch::optim::SGD> none;
  REQUIRE_ERROR("the optimizer pointer must not be null", ga::Trainer(probe, none, slope));
  std::shared_ptr<Probe> no_model;
  ga::Trainer nothing(no_model, probe.sgd, [](auto& net, double value) { return net->parameter.sum() * value; });
  REQUIRE_ERROR("the model pointer must not be null", nothing.fit(std::vector<double>{1.0}));

  const std::vector<double> batches{1.0, 1.0};
  std::function<void()> inside;
  ga::Trainer outer(probe, probe.sgd, slope, [&](const ga::Step&) { inside(); });
  inside = [&] { outer.fit(batches); };
  REQUIRE_ERROR("fit() was called inside fit()", outer.fit(batches));
  inside = [] {};
  CHECK(outer.fit(batches).updates == 2);

  ga::Trainer steps(probe, probe.sgd, [&](Probe& net, double value) {
    inside();
    return net.parameter.sum() * value;
  });
  inside = [&] { steps.step(1.0); };
  REQUIRE_ERROR("step() or flush() was called inside a micro-batch", steps.step(1.0));
  inside = [&] { steps.flush(); };
  REQUIRE_ERROR("step() or flush() was called inside a micro-batch", steps.step(1.0));
  inside = [] {};
  CHECK(steps.step(1.0));

  struct OnePass {
    int* left;
    struct Iterator {
      int* left;
      double operator*() const { return 1.0; }
      void operator++() { --*left; }
      bool operator!=(std::default_sentinel_t) const { return *left > 0; }
    };
    Iterator begin() const { return {left}; }
    std::default_sentinel_t end() const { return {}; }
  };
  int left = 3;
  REQUIRE_ERROR(
      "epoch 1 (counted from 0) had no batches, but should have had 3; a range that can be iterated only once",
      ga::Trainer(probe, probe.sgd, slope).fit(OnePass{&left}, {.epochs = 2}));
}

TEST_CASE("Trainer: an invalid state changes nothing") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope);
  trainer.fit(std::vector<double>{1.0});
  ga::Archive saved;
  trainer.state(saved);
  auto values = saved.values();
  values["updates"] = std::int64_t{-7};
  ga::Archive hostile(values);
  REQUIRE_ERROR("updates and epochs of a state must be >= 0, got -7 and 1", trainer.state(hostile));
  CHECK(trainer.updates() == 1);
  ga::Trainer scheduled(probe, probe.sgd, slope, ga::MixedPrecision{.dtype = at::kHalf});
  ga::Archive incomplete(saved.values());
  REQUIRE_ERROR("mixed_precision", scheduled.state(incomplete));
  CHECK(scheduled.updates() == 0);
}

namespace {

struct Early {
  void attach(auto& trainer) { trainer.template policy<ga::MixedPrecision>().amp_scaler(); }
};

// Records the order in which hooks are called.
struct Order {
  std::vector<std::string> calls = {};
  int forward_scope() { return calls.push_back("forward_scope"), 0; }
  void before_backward(ga::Loss&) { calls.push_back("before_backward"); }
  bool ready() { return calls.push_back("ready"), true; }
  void after_backward(ga::Gradients&) { calls.push_back("after_backward"); }
  void before_close() { calls.push_back("before_close"); }
  void scale_gradients(ga::Factor&) { calls.push_back("scale_gradients"); }
  void before_step(ga::Gradients&) { calls.push_back("before_step"); }
  void after_window(const ga::Step&) { calls.push_back("after_window"); }
  void after_step(const ga::Step&) { calls.push_back("after_step"); }
  void on_epoch_begin(std::int64_t epoch) { calls.push_back("begin " + std::to_string(epoch)); }
  void on_epoch_end(std::int64_t epoch) { calls.push_back("end " + std::to_string(epoch)); }
};

}  // namespace

TEST_CASE("Trainer: hooks are called in the documented order") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope, Order{});
  trainer.fit(std::vector<double>{1.0});
  using Calls = std::vector<std::string>;
  CHECK(trainer.policy<Order>().calls == Calls{"begin 0", "forward_scope", "before_backward", "ready", "after_backward",
                                               "before_close", "scale_gradients", "before_step", "after_window",
                                               "after_step", "end 0"});
  trainer.policy<Order>().calls.clear();
  trainer.fit(std::vector<double>{}, {.epochs = 2});
  CHECK(trainer.policy<Order>().calls == Calls{"begin 1", "end 1", "begin 2", "end 2"});
}

TEST_CASE("Trainer: hooks of a policy of several ranks are called before those of others") {
  struct OfOne {
    std::vector<std::string>* calls;
    void after_step(const ga::Step&) { calls->push_back("one"); }
  };
  struct OfRanks {
    std::vector<std::string>* calls;
    bool others_continue() { return false; }
    void after_step(const ga::Step&) { calls->push_back("ranks"); }
  };
  Probe probe;
  std::vector<std::string> calls;
  ga::Trainer trainer(probe, probe.sgd, slope, OfOne{&calls}, OfRanks{&calls});
  trainer.fit(std::vector<double>{1.0});
  CHECK(calls == std::vector<std::string>{"ranks", "one"});
}

TEST_CASE("Trainer: a class derived from a policy keeps its own hooks beside the policy's") {
  struct Counts : ga::Accumulate {
    std::int64_t* updates = nullptr;
    void after_step(const ga::Step&) { ++*updates; }
  };
  Probe probe;
  std::int64_t updates = 0;
  Counts counts;
  counts.steps = 2;
  counts.updates = &updates;
  ga::Trainer trainer(probe, probe.sgd, slope, counts);
  trainer.fit(std::vector<double>{1.0, 1.0, 1.0, 1.0});
  CHECK(updates == 2);
}

TEST_CASE("Trainer: what attach of a policy sets is not undone by policies that start later") {
  struct InFloat {
    void attach(ga::TrainerBase& trainer) { trainer.set_accumulate_in(at::kFloat); }
  };
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  net->to(at::kBFloat16);
  torch::nn::init::zeros_(net->weight);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1.0));
  // 256 + 1 + 1 is 258 in float32, and 256 in bfloat16.
  const auto weighed = [](auto& model, double slope) { return ga::Loss{(model->weight * slope).sum(), 1}; };
  ga::Trainer trainer(net, sgd, weighed, ga::Accumulate{.steps = 3}, InFloat{});
  trainer.fit(std::vector<double>{256, 1, 1});
  CHECK(net->weight.item<float>() == -86.0f);
}

TEST_CASE("Trainer: results of a policy that has not started are refused") {
  Probe probe;
  REQUIRE_ERROR("amp_scaler() must be called after the trainer is built",
                ga::Trainer(probe, probe.sgd, slope, ga::MixedPrecision{}, Early{}));
}

TEST_CASE("Trainer: two Trainers with the same options of a policy have a run each") {
  Probe one, other;
  const ga::MixedPrecision half{.dtype = at::kHalf, .scaler = {.init_scale = 256.0}};
  ga::Trainer first(one, one.sgd, slope, half), second(other, other.sgd, slope, half);
  first.fit(std::vector<double>{std::numeric_limits<double>::infinity()}, {.on_nan = ga::OnNan::ignore});
  CHECK(first.policy<ga::MixedPrecision>().amp_scaler().get_scale() == 128.0);
  CHECK(second.policy<ga::MixedPrecision>().amp_scaler().get_scale() == 256.0);
}

TEST_CASE("Trainer: a window without items is not stepped, with any gradients") {
  Probe probe;
  struct Counts : torch::optim::SGD {
    using SGD::SGD;
    int steps = 0;
    at::Tensor step(LossClosure closure = nullptr) override { return ++steps, SGD::step(closure); }
  } counts({probe.parameter}, torch::optim::SGDOptions(1.0));
  ga::Trainer trainer(probe, counts, [](Probe& net, double value) { return ga::Loss{net.parameter.sum() * value, 0}; });
  trainer.fit(std::vector<double>{1.0, 1.0});
  CHECK(counts.steps == 0);
}

TEST_CASE("Trainer: 16-bit gradients are summed in float32 on request") {
  const auto gradient_sum = [](auto accumulate) {
    struct Net : torch::nn::Module {
      at::Tensor parameter = register_parameter("parameter", torch::zeros({1}, at::kBFloat16));
    } net;
    torch::optim::SGD sgd(net.parameters(), 1.0);
    double norm = 0;
    ga::Trainer trainer(
        net, sgd, [](Net& net, double slope) { return (net.parameter * slope).sum().to(at::kFloat); }, accumulate,
        ga::ClipNorm{.max = 1e9}, [&](const ga::Step& step) { norm = step.grad_norm.template item<double>(); });
    std::vector<double> slopes(257, 1.0 / 256);
    slopes[0] = 1.0;
    trainer.fit(slopes);
    return norm * 257;
  };
  CHECK(gradient_sum(ga::Accumulate{.steps = 257, .accumulate_in = at::kFloat}) == Approx(2.0).epsilon(1e-6));
  CHECK(gradient_sum(ga::Accumulate{.steps = 257}) < 1.5);  // 1 + 1/256 is 1 in bfloat16
}

TEST_CASE("Trainer: a report that prints as a summary") {
  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope);
  const auto report = trainer.fit(std::vector<double>{1.0, 2.0}, {.measure_memory = true});
  CHECK(report.seconds > 0);
  CHECK(report.samples_per_second == Approx(2 / report.seconds));
  CHECK(report.peak_bytes.at("cpu") > 0);
  CHECK(report.occupied_bytes.at("cpu") > 1 << 20);
  CHECK(report.peak_resident_bytes > report.occupied_bytes.at("cpu") / 2);  // Linux measures them slightly differently
  std::ostringstream text;
  text << report;
  CHECK(contains(text.str(), "Time: "));
  CHECK(contains(text.str(), "Epochs: 1, updates: 2, skipped: 0\n"));
  CHECK(trainer.fit(std::vector<double>{1.0}).peak_bytes.empty());
}

TEST_CASE("Trainer: its state is saved and loaded") {
  const auto batches = make_batches({4, 4, 4, 4}, at::kFloat);
  const auto make = [](Run& run) {
    return std::make_unique<decltype(ga::Trainer(
        run.model, run.adamw, mean_of_batch, ga::Accumulate{.steps = 2},
        ga::Schedule{ga::lr::Cosine{.peak = 0.02, .warmup = 2, .total = 12}}, ga::Ema{.decay = 0.9},
        ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 64, .growth_interval = 3}}))>(
        run.model, run.adamw, mean_of_batch, ga::Accumulate{.steps = 2},
        ga::Schedule{ga::lr::Cosine{.peak = 0.02, .warmup = 2, .total = 12}}, ga::Ema{.decay = 0.9},
        ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 64, .growth_interval = 3}});
  };
  Run straight, first, second;
  auto uninterrupted = make(straight), before = make(first), after = make(second);
  uninterrupted->fit(batches, {.epochs = 4});

  before->fit(batches, {.epochs = 2});
  ga::Archive saved;
  before->state(saved);
  ga::Archive loading(saved.values());
  after->state(loading);
  loading.check_all_used();
  after->fit(batches, {.epochs = 2});
  CHECK(after->updates() == 8);
  CHECK(same_bits(flat(second.model), flat(straight.model)));
  after->policy<ga::Ema>().swap(second.model);
  uninterrupted->policy<ga::Ema>().swap(straight.model);
  CHECK(same_bits(flat(second.model), flat(straight.model)));
  CHECK(after->policy<ga::MixedPrecision>().amp_scaler().state_dict() ==
        uninterrupted->policy<ga::MixedPrecision>().amp_scaler().state_dict());
}

TEST_CASE("Trainer: LBFGS and accumulators behind a reference are refused") {
  Probe probe;
  torch::optim::LBFGS lbfgs(probe.parameters());
  torch::optim::Optimizer& base = lbfgs;
  REQUIRE_ERROR("Trainer: the optimizer must not be LBFGS", ga::Trainer(probe, base, slope));
  ga::GradAccumulator accumulator(probe.sgd, {.steps = 2});
  torch::optim::Optimizer& facade = accumulator;
  REQUIRE_ERROR("Trainer: the optimizer must not be another accumulator behind a reference; ga::Accumulate{.steps = n}",
                ga::Trainer(probe, facade, slope));
}

namespace {

// A policy that uses its Trainer in its destructor.
struct LooksBack {
  ga::TrainerBase* trainer = nullptr;
  std::vector<std::size_t>* seen = nullptr;

  LooksBack(std::vector<std::size_t>& seen) : seen(&seen) {}
  LooksBack(LooksBack&& other) noexcept : trainer(std::exchange(other.trainer, nullptr)), seen(other.seen) {}
  ~LooksBack() {
    if (trainer) seen->push_back(trainer->module().parameters().size() + trainer->parameters().size());
  }
  void attach(ga::TrainerBase& given) { trainer = &given; }
};

}  // namespace

TEST_CASE("Trainer: a policy's destructor can use model and optimizer") {
  std::vector<std::size_t> seen;
  {
    torch::nn::Linear model(2, 1);
    auto sgd = std::make_shared<torch::optim::SGD>(model->parameters(), 0.1);
    ga::Trainer trainer(
        std::move(model), std::move(sgd), [](auto& net, auto& batch) { return net->forward(batch).sum(); },
        LooksBack(seen));
    trainer.step(torch::ones({1, 2}));
    CHECK(seen.empty());
  }
  CHECK(seen == std::vector<std::size_t>{4});
}

TEST_CASE("Trainer: a policy that is destroyed because another one is refused can use them, too") {
  std::vector<std::size_t> seen;
  Probe probe;
  REQUIRE_ERROR("steps must be >= 1",
                ga::Trainer(probe, probe.sgd, slope, LooksBack(seen), ga::Accumulate{.steps = 0}));
  CHECK(seen == std::vector<std::size_t>{2});
}

TEST_CASE("Trainer: a policy may be absent") {
  const auto batches = make_batches({3, 3, 3, 3});
  const auto parameters = [&](auto... policies) {
    Run run(at::kDouble);
    ga::Trainer trainer(run.model, run.adamw, mean_of_batch, std::move(policies)...);
    trainer.fit(batches, {.epochs = 2});
    return flat(run.model);
  };
  const ga::Accumulate two{.steps = 2};
  const ga::ClipNorm clip{.max = 0.01};
  int calls = 0;
  const auto count = [&](const ga::Step&) { ++calls; };
  const auto absent = [](const auto& policy) { return std::optional<std::decay_t<decltype(policy)>>(); };
  CHECK(same_bits(parameters(std::optional(two), std::optional(clip), std::optional(count)), parameters(two, clip)));
  CHECK(std::exchange(calls, 0) == 4);
  CHECK(same_bits(parameters(two, absent(clip), absent(count), absent(ga::Progress())), parameters(two)));
  CHECK(same_bits(parameters(absent(two), clip), parameters(clip)));
  CHECK(calls == 0);
  CHECK_FALSE(same_bits(parameters(two, clip), parameters(two)));

  Probe probe;
  ga::Trainer trainer(probe, probe.sgd, slope, std::optional(two), absent(clip));
  CHECK(trainer.policy<ga::Accumulate>().steps == 2);
  REQUIRE_ERROR("Trainer: policy<ClipNorm>() must be present, but its std::optional was empty",
                trainer.policy<ga::ClipNorm>());
}

TEST_CASE("Trainer: a schedule does not set its rate if another policy is refused") {
  Probe probe;
  const ga::Schedule schedule{[](std::int64_t) { return 0.25; }};
  const auto rate = [&] { return probe.sgd.param_groups()[0].options().get_lr(); };
  REQUIRE_ERROR("steps must be >= 1", ga::Trainer(probe, probe.sgd, slope, schedule, ga::Accumulate{.steps = 0}));
  CHECK(rate() == 1.0);
  ga::Trainer trainer(probe, probe.sgd, slope, schedule);
  CHECK(rate() == 0.25);
}

TEST_CASE("Trainer: errors of a window give advice for a Trainer") {
  const auto batches = make_batches({3, 3, 3, 3});
  Run run(at::kDouble);
  const int which = GENERATE(0, 1);
  const auto objective = [&](auto& net, auto& batch) {
    if (which == 0) net->zero_grad();
    if (which == 1) loss_of(net, batch).backward();
    return loss_of(net, batch);
  };
  ga::Trainer trainer(run.model, run.adamw, objective, ga::Accumulate{.steps = 2});
  const auto error = error_of([&] { trainer.fit(batches); });
  const std::string said = "Trainer: this is its window, and it calls backward, step and zero_grad itself";
  CHECK(contains(error, said));
  CHECK(error.find(said) == error.rfind(said));  // once
  CHECK(contains(error, which == 0 ? "vanished inside a window" : "has a gradient from before this window"));
}

TEST_CASE("Trainer: on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto batches = make_batches({5, 2, 7, 4}, at::kFloat);
  auto model = make_model(at::kFloat), peer = make_model(at::kFloat);
  model->to(at::kCUDA);
  torch::optim::SGD sgd(model->parameters(), 0.1), peer_sgd(peer->parameters(), 0.1);
  const auto on_device = [](auto& net, auto& batch) {
    return ga::Loss{torch::mse_loss(net->forward(batch.data.cuda()), batch.target.cuda()), batch.target.numel()};
  };
  ga::Trainer trainer(model, sgd, on_device, ga::Accumulate{.steps = 3}, ga::ClipNorm{.max = 0.5});
  ga::Trainer on_cpu(peer, peer_sgd, weighted, ga::Accumulate{.steps = 3}, ga::ClipNorm{.max = 0.5});
  const auto report = trainer.fit(batches, {.epochs = 3, .measure_memory = true});
  on_cpu.fit(batches, {.epochs = 3});
  CHECK(distance(flat(model).cpu(), flat(peer)) < 1e-4);
  if (device_memory_is_known) CHECK(report.occupied_bytes.at("cuda:0") > 0);
  CHECK(report.peak_bytes.at("cuda:0") > 0);
  const auto nan_on_device = [](auto& net, auto& batch) {
    return torch::mse_loss(net->forward(batch.data.cuda()), batch.target.cuda()) *
           (batch.data.size(0) == 7 ? not_a_number : 1.0);
  };
  const auto before = flat(model);
  ga::Trainer stops(model, sgd, nan_on_device, ga::Accumulate{.steps = 4});
  REQUIRE_ERROR("for batch 2 of epoch 0 (both counted from 0), in update 1", stops.fit(batches));
  CHECK(same_bits(flat(model), before));
  CHECK(stops.fit(batches, {.on_nan = ga::OnNan::skip}).nan_batches == 1);
}

TEST_CASE("Trainer: the learning rate of an optimizer whose groups are not LibTorch's") {
  struct Options {
    double get_lr() const { return 0.25; }
  };
  struct Group {
    std::vector<at::Tensor> all;
    std::vector<at::Tensor>& params() { return all; }
    Options options() const { return {}; }
  };
  struct Own {
    std::vector<Group> groups;
    void step() {}
    void zero_grad() {}
    std::vector<Group>& param_groups() { return groups; }
  };
  auto model = make_model();
  Own own{{{model->parameters()}}};
  ga::Trainer trainer(model, own, [](auto& net, auto& batch) { return loss_of(net, batch); });
  CHECK(trainer.learning_rate() == 0.25);
  REQUIRE_ERROR("needs an optimizer with param_groups(), got", trainer.learning_rates());
  own.groups.clear();
  CHECK(std::isnan(trainer.learning_rate()));
}
