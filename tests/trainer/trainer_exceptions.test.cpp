// SPDX-License-Identifier: Apache-2.0
//
// An exception from any hook, and from all other code that a Trainer calls, leaves model, optimizer and modes usable.
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/trainer.hpp>

#include <ATen/autocast_mode.h>

#include "support/breaks.hpp"
#include "support/models.hpp"

#include <cmath>
#include <map>
#include <string>

namespace ga = gradaccum;
using namespace testing;

namespace {

// Throws in the hook of this name at its second call.
struct Throws {
  std::string where = {};
  std::map<std::string, int> calls = {};

  void hook(const std::string& name) {
    if (++calls[name] == 2 && name == where) throw std::runtime_error("from " + name);
  }
  int forward_scope() { return hook("forward_scope"), 0; }
  void before_backward(ga::Loss&) { hook("before_backward"); }
  bool ready() { return hook("ready"), true; }
  void after_backward(ga::Gradients&) { hook("after_backward"); }
  void before_close() { hook("before_close"); }
  void scale_gradients(ga::Factor&) { hook("scale_gradients"); }
  void before_step(ga::Gradients&) { hook("before_step"); }
  void after_window(const ga::Step&) { hook("after_window"); }
  void after_step(const ga::Step&) { hook("after_step"); }
  void on_epoch_begin(std::int64_t) { hook("on_epoch_begin"); }
  void on_epoch_end(std::int64_t) { hook("on_epoch_end"); }
};

const std::vector<std::string> hooks{"forward_scope", "before_backward", "ready",       "after_backward",
                                     "before_close",  "scale_gradients", "before_step", "after_window",
                                     "after_step",    "on_epoch_begin",  "on_epoch_end"};

const auto objective = [](auto& net, auto& batch) { return loss_of(net, batch); };

bool has_gradients(const torch::nn::Sequential& model) {
  for (auto& parameter : model->parameters())
    if (parameter.grad().defined()) return true;
  return false;
}

}  // namespace

TEST_CASE("Trainer: after an exception from any hook, training continues as if the broken window had not existed") {
  const auto batches = make_batches({3, 4, 5, 3, 4, 5, 3});
  auto model = make_model(), peer = make_model();
  torch::optim::Adam adam(model->parameters(), 0.01), peer_adam(peer->parameters(), 0.01);
  model->eval();
  const auto where = GENERATE(from_range(hooks));
  CAPTURE(where);

  ga::Trainer trainer(model, adam, objective, ga::Accumulate{.steps = 3}, ga::ClipNorm{.max = 0.5},
                      ga::MixedPrecision{.dtype = at::kBFloat16}, Throws{.where = where});
  const auto message = error_of([&] { trainer.fit(batches, {.epochs = 2}); });
  REQUIRE(message == "from " + where);
  CHECK_FALSE(model->is_training());
  CHECK(at::GradMode::is_enabled());
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(trainer.window().micro_batches == 0);
  CHECK_FALSE(trainer.closing());
  CHECK_FALSE(has_gradients(model));

  // A new trainer with a copy of the model and the optimizer gives the same results from here on.
  {
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < model->parameters().size(); ++i) peer->parameters()[i].copy_(model->parameters()[i]);
  }
  std::stringstream file;
  torch::save(adam, file);
  torch::load(peer_adam, file);
  ga::Trainer fresh(peer, peer_adam, objective, ga::Accumulate{.steps = 3}, ga::ClipNorm{.max = 0.5},
                    ga::MixedPrecision{.dtype = at::kBFloat16});
  peer->eval();
  CHECK(trainer.fit(batches).updates == 3);
  CHECK(fresh.fit(batches).updates == 3);
  CHECK(at::equal(flat(model), flat(peer)));
}

TEST_CASE("Trainer: exceptions of the objective, the loader, the optimizer and a callback") {
  const auto batches = make_batches({3, 4, 5});
  auto model = make_model();
  const auto before = flat(model);
  bool break_now = true;

  SECTION("the objective, inside a window") {
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(
        model, sgd,
        [&](auto& net, auto& batch) {
          if (break_now && batch.data.size(0) == 4) throw std::runtime_error("objective");
          return loss_of(net, batch);
        },
        ga::Accumulate{.steps = 3});
    REQUIRE_ERROR("objective", trainer.fit(batches));
    CHECK(at::equal(flat(model), before));
    CHECK_FALSE(has_gradients(model));
    REQUIRE_ERROR("objective", trainer.evaluate(batches));
    CHECK(model->is_training());
    CHECK(at::GradMode::is_enabled());
    break_now = false;
    CHECK(trainer.fit(batches).updates == 1);
  }
  SECTION("backward") {
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(
        model, sgd,
        [&](auto& net, auto& batch) {
          auto loss = loss_of(net, batch);
          if (break_now && batch.data.size(0) == 5)
            loss.register_hook([](const at::Tensor&) { throw std::runtime_error("backward"); });
          return loss;
        },
        ga::Accumulate{.steps = 2});
    REQUIRE_ERROR("backward", trainer.fit(batches));
    CHECK(trainer.updates() == 1);
    CHECK_FALSE(has_gradients(model));
    break_now = false;
    CHECK(trainer.fit(batches).updates == 2);
  }
  SECTION("the range of batches, inside a window") {
    struct Breaking {
      const std::vector<Example>& batches;
      struct Iterator {
        const std::vector<Example>* batches;
        std::size_t i = 0;
        const Example& operator*() const { return (*batches)[i]; }
        void operator++() {
          if (++i == 2) throw std::runtime_error("loader");
        }
        bool operator!=(std::default_sentinel_t) const { return i < batches->size(); }
      };
      Iterator begin() const { return {&batches}; }
      std::default_sentinel_t end() const { return {}; }
    };
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 3});
    REQUIRE_ERROR("loader", trainer.fit(Breaking{batches}));
    CHECK(trainer.window().micro_batches == 0);
    CHECK_FALSE(has_gradients(model));
    CHECK(trainer.fit(batches).updates == 1);
  }
  SECTION("the optimizer's step") {
    Breaks breaks(model->parameters(), torch::optim::SGDOptions(0.1));
    ga::Trainer trainer(model, breaks, objective, ga::Accumulate{.steps = 3});
    REQUIRE_ERROR("step broke", trainer.fit(batches));
    CHECK(trainer.updates() == 0);
    CHECK_FALSE(has_gradients(model));
    breaks.breaks = false;
    CHECK(trainer.fit(batches).updates == 1);
  }
  SECTION("a callback: the parameters have moved, and that is counted") {
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(model, sgd, objective, [](const ga::Step&) { throw std::runtime_error("callback"); });
    REQUIRE_ERROR("callback", trainer.fit(batches));
    CHECK(trainer.updates() == 1);
    CHECK_FALSE(at::equal(flat(model), before));
  }
  SECTION("attach: no trainer comes of it") {
    torch::optim::SGD sgd(model->parameters(), 0.1);
    REQUIRE_ERROR("Accumulate: steps must be >= 1, got 0",
                  ga::Trainer(model, sgd, objective, ga::Accumulate{.steps = 0}));
    REQUIRE_ERROR("ClipNorm: max must be > 0, got -1", ga::Trainer(model, sgd, objective, ga::ClipNorm{.max = -1}));
    REQUIRE_ERROR("ClipValue: max must be >= 0, got -1", ga::Trainer(model, sgd, objective, ga::ClipValue{.max = -1}));
    ga::Trainer(model, sgd, objective).fit(batches);
  }
  SECTION("a loss that is none") {
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer shape(model, sgd, [](auto& net, auto& batch) { return net->forward(batch.data); });
    REQUIRE_ERROR("Loss: the mean must have one element, got shape [3, 3]", shape.fit(batches));
    ga::Trainer undefined(model, sgd, [](auto&, auto&) { return at::Tensor(); });
    REQUIRE_ERROR("got an undefined tensor", undefined.fit(batches));
    ga::Trainer detached(model, sgd, [](auto& net, auto& batch) { return loss_of(net, batch).detach(); });
    REQUIRE_ERROR("must require grad", detached.fit(batches));
    ga::Trainer negative(model, sgd, [](auto& net, auto& batch) { return ga::Loss{loss_of(net, batch), -1}; });
    REQUIRE_ERROR("items must be finite and >= 0, got -1", negative.fit(batches));
    CHECK(at::equal(flat(model), before));
  }
}

TEST_CASE("Trainer: parts frozen by the user stay frozen, and grad mode is restored") {
  auto model = make_model();
  model->children()[1]->eval();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  std::vector<bool> modes;
  ga::Trainer trainer(model, sgd, [&](auto& net, auto& batch) {
    modes = {net->is_training(), net->children()[0]->is_training(), net->children()[1]->is_training()};
    return loss_of(net, batch);
  });
  const auto batches = make_batches({3});
  trainer.fit(batches);
  CHECK(modes == std::vector<bool>{true, true, false});
  trainer.evaluate(batches);
  CHECK(modes == std::vector<bool>{false, false, false});
  CHECK_FALSE(model->children()[1]->is_training());
  CHECK(model->children()[0]->is_training());

  model->eval();
  at::NoGradGuard no_grad;
  trainer.fit(batches);
  CHECK(modes == std::vector<bool>{true, true, true});
  CHECK_FALSE(model->is_training());
  CHECK_FALSE(at::GradMode::is_enabled());
}

TEST_CASE("Trainer: skipped windows change neither schedule nor average, and are not counted") {
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  std::int64_t seen = 0, callbacks = 0;
  std::vector<ga::Step> windows;
  struct Records {
    std::vector<ga::Step>* windows;
    void after_window(const ga::Step& step) { windows->push_back(step); }
  };
  ga::Trainer trainer(
      model, sgd,
      [&](auto& net, auto& batch) {
        auto loss = loss_of(net, batch);
        return ++seen % 2 == 0 ? loss * 1e38 : loss;
      },
      ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 1024.0}},
      ga::Schedule{[](std::int64_t update) { return 0.1 / static_cast<double>(1 + update); }}, ga::Ema{.decay = 0.5},
      Records{&windows}, [&](const ga::Step&) { ++callbacks; });
  const auto report = trainer.fit(make_batches({3, 3, 3, 3, 3}, at::kFloat));
  CHECK(report.updates == 3);
  CHECK(report.skipped == 2);
  CHECK(callbacks == 3);
  CHECK(trainer.policy<ga::Ema>().updates() == 3);
  CHECK(sgd.param_groups()[0].options().get_lr() == 0.1 / 4);
  REQUIRE(windows.size() == 5);
  CHECK(windows[1].overflowed);
  CHECK_FALSE(windows[1].moved);
  CHECK(windows[1].update == 1);
  CHECK(windows[2].lr == 0.1 / 2);
  CHECK(trainer.policy<ga::MixedPrecision>().amp_scaler().get_scale() == 256.0);
}

TEST_CASE("Trainer: batches with a graph are an error with the batch's number, and advice to detach them") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.01);
  auto batches = make_batches({3, 4});
  const auto weight = torch::ones({1}, at::kDouble).requires_grad_();
  batches[1].data = (batches[1].data * weight).sin();
  ga::Trainer trainer(model, sgd, objective);
  const auto error = error_of([&] { trainer.fit(batches, {.epochs = 2}); });
  CHECK(contains(error, "detach() its tensors"));
  CHECK(contains(error, "in batch 1 of epoch 1"));
  batches[1].data = batches[1].data.detach();
  CHECK(trainer.fit(batches).updates == 2);
}

/// A metric that sums losses; 1 if they still have a graph.
struct SumOfLosses {
  static constexpr std::string_view name = "graphs";
  void add(const ga::Loss& loss) { sum = sum.defined() ? sum + loss.mean : loss.mean * 1; }
  double value() const { return sum.requires_grad() ? 1 : 0; }
  void reset() { sum = at::Tensor(); }
  at::Tensor sum;
};

// The loss of a physics-informed network: of the values, and of a differential equation, u'' = -u, at random points.
TEST_CASE("Trainer: an objective that differentiates is trained, and evaluated with gradients enabled") {
  const auto physics = [](auto& net, auto& batch) {
    const auto points = batch.data.clone().requires_grad_();
    const auto u = net->forward(points);
    const auto slope = torch::autograd::grad({u.sum()}, {points}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    const auto second = torch::autograd::grad({slope.sum()}, {points}, {}, true, /*create_graph=*/true)[0];
    return torch::mse_loss(u, batch.target) + (second.sum(1, true) + u).square().mean();
  };
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.01);
  const auto batches = make_batches({3, 4, 5});
  {
    ga::Trainer trainer(model, sgd, physics, ga::Accumulate{.steps = 2});
    CHECK(trainer.fit(batches).updates == 2);
    REQUIRE_ERROR("ga::WithGradients()", trainer.evaluate(batches));
    const auto found = trainer.evaluate(batches, ga::WithGradients(), SumOfLosses());
    CHECK(found["graphs"] == 0);
    double sum = 0, rows = 0;
    for (auto& batch : batches) {
      const auto loss = physics(model, batch).template item<double>();
      const auto samples = static_cast<double>(batch.data.size(0));
      sum += loss * samples, rows += samples;
    }
    CHECK(std::abs(found["loss"] - sum / rows) < 1e-12);
    CHECK(found.samples == 12);
    CHECK_FALSE(has_gradients(model));
    CHECK(model->is_training());
    CHECK(at::GradMode::is_enabled());
  }
  ga::Trainer trainer(model, sgd, physics, ga::Validate(batches, {.every_updates = 1}, ga::WithGradients()));
  CHECK(trainer.fit(batches).validations.size() == 3);
  ga::Trainer without(model, sgd, physics, ga::Validate(batches));
  REQUIRE_ERROR("ga::WithGradients()", without.fit(batches));
}
