// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/trainer.hpp>

#include "support/models.hpp"

#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

const auto objective = [](auto& net, auto& batch) {
  return ga::Loss(torch::mse_loss(net->forward(batch.data), batch.target), batch.data.size(0));
};

/// Replaces the policy: the ordinary step.
struct Nothing {
  void on_epoch_begin(std::int64_t) {}
};

/// A policy that derives from policies of the library, without the refused hooks.
struct Derived : ga::OptimizerInBackward, Nothing {};

/// The visible results of a training: steps, the report, the weights.
struct Outcome {
  std::vector<ga::Step> steps;
  ga::FitReport report;
  at::Tensor weights, average;
};

void check_same(const Outcome& a, const Outcome& b) {
  REQUIRE(a.steps.size() == b.steps.size());
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    const auto &x = a.steps[i], &y = b.steps[i];
    CAPTURE(i);
    CHECK((x.update == y.update && x.epoch == y.epoch && x.micro_batches == y.micro_batches));
    CHECK((x.samples == y.samples && x.items == y.items && x.moved == y.moved && x.overflowed == y.overflowed));
    CHECK(at::allclose(x.loss, y.loss, 0, 0, /*equal_nan=*/true));
    CHECK((x.grad_norm.defined() == y.grad_norm.defined() && x.lr == y.lr));
  }
  CHECK((a.report.epochs == b.report.epochs && a.report.updates == b.report.updates));
  CHECK((a.report.skipped == b.report.skipped && a.report.samples == b.report.samples));
  CHECK(a.report.nan_batches == b.report.nan_batches);
  CHECK(at::equal(a.weights, b.weights));
  CHECK(at::equal(a.average, b.average));
}

torch::nn::Sequential large_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(4, 300), torch::nn::Tanh(), torch::nn::Linear(300, 300),
                               torch::nn::Tanh(), torch::nn::Linear(300, 3));
}

struct KeepsWindows {
  std::vector<ga::Step>* steps;
  void after_window(const ga::Step& step) { steps->push_back(step); }
};

template <class InBackward>
Outcome trained(InBackward in_backward, ga::Accumulate accumulate, const std::vector<Example>& batches,
                ga::FitOptions options = {.epochs = 3}, bool mixed = false) {
  auto model = large_model();
  ga::optim::AdamW adamw(model->parameters(), 0.01);
  Outcome outcome;
  ga::Trainer trainer(model, adamw, objective, in_backward, std::move(accumulate),
                      ga::MixedPrecision{.dtype = at::kBFloat16, .enabled = mixed},
                      ga::Schedule{[](std::int64_t update) { return 0.01 / static_cast<double>(1 + update); }},
                      ga::Ema{.decay = 0.9}, KeepsWindows{&outcome.steps}, [](const ga::Step&) {});
  outcome.report = trainer.fit(batches, options);
  outcome.weights = flat(model);
  trainer.template policy<ga::Ema>().swap(model);
  outcome.average = flat(model);
  return outcome;
}

template <class... Policies>
auto trainer_with(torch::nn::Sequential& model, ga::optim::SGD& sgd, Policies... policies) {
  ga::Trainer trainer(model, sgd, objective, std::move(policies)...);
  return trainer.fit(make_batches({3, 5, 2}, at::kFloat));
}

}  // namespace

TEST_CASE("OptimizerInBackward: a training is bitwise the same as without it, with any window") {
  const auto batches = make_batches({3, 5, 2, 7, 1, 4, 6}, at::kFloat);
  const auto mixed = GENERATE(false, true);
  for (auto& accumulate : {ga::Accumulate{}, ga::Accumulate{.steps = 4}, ga::Accumulate{.schedule = {{0, 3}, {1, 2}}},
                           ga::Accumulate{.batch_size = 8}, ga::Accumulate{.steps = 2, .accumulate_in = at::kDouble}})
    for (auto tail : {ga::Tail::flush, ga::Tail::drop, ga::Tail::carry}) {
      const ga::FitOptions options{.epochs = 3, .tail = tail};
      const auto ordinary = trained(Nothing{}, accumulate, batches, options, mixed);
      check_same(trained(ga::OptimizerInBackward{}, accumulate, batches, options, mixed), ordinary);
      check_same(trained(Derived{}, accumulate, batches, options, mixed), ordinary);
    }
  const auto one = trained(ga::OptimizerInBackward{}, {}, batches), two = trained(Nothing{}, {.steps = 2}, batches);
  CHECK_FALSE(at::equal(one.weights, two.weights));
}

TEST_CASE("OptimizerInBackward: parameters are updated in backward") {
  auto model = large_model();
  ga::optim::SGD sgd(model->parameters(), 0.1);
  struct Looks {
    at::Tensor* weight;
    std::vector<at::Tensor>* seen;
    void after_backward(ga::Gradients&) { seen->push_back(weight->detach().clone()); }
  };
  at::Tensor weight = model->parameters()[2];
  std::vector<at::Tensor> seen{weight.detach().clone()};
  ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2}, ga::OptimizerInBackward{},
                      Looks{&weight, &seen});
  for (auto& batch : make_batches({3, 5}, at::kFloat)) trainer.step(batch);
  CHECK(at::equal(seen[1], seen[0]));
  CHECK_FALSE(at::equal(seen[2], seen[1]));
  CHECK(at::equal(weight, seen[2]));
}

TEST_CASE("OptimizerInBackward: batches whose loss is NaN, skipped or an error, change nothing") {
  auto batches = make_batches({3, 5, 2, 7}, at::kFloat);
  batches[1].data.fill_(std::numeric_limits<float>::quiet_NaN());  // fills a window
  const auto skipping = [&](auto in_backward, std::int64_t steps) {
    return trained(in_backward, {.steps = steps}, batches, {.epochs = 2, .on_nan = ga::OnNan::skip});
  };
  for (std::int64_t steps : {1, 2}) {
    check_same(skipping(ga::OptimizerInBackward{}, steps), skipping(Nothing{}, steps));
    CHECK(skipping(ga::OptimizerInBackward{}, steps).report.nan_batches == 2);
  }

  auto model = large_model();
  ga::optim::SGD sgd(model->parameters(), 0.1);
  ga::Trainer trainer(model, sgd, objective, ga::OptimizerInBackward{});
  const auto before = flat(model);
  REQUIRE_ERROR("the loss must be finite", trainer.step(batches[1]));
  CHECK(at::equal(flat(model), before));
  CHECK(trainer.step(batches[0]));
}

TEST_CASE("OptimizerInBackward: factors of policies count once, before the step") {
  struct Halves {
    int* calls;
    void scale_gradients(ga::Factor& factor) const {
      ++*calls;
      factor.multiply(0.5);
    }
  };
  const auto run = [](auto in_backward, int* calls, std::int64_t steps) {
    auto model = large_model();
    ga::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(model, sgd, objective, in_backward, ga::Accumulate{.steps = steps}, Halves{calls});
    trainer.fit(make_batches({3, 5, 2}, at::kFloat));
    return flat(model);
  };
  for (std::int64_t steps : {1, 2}) {
    int early = 0, ordinary = 0;
    CHECK(at::equal(run(ga::OptimizerInBackward{}, &early, steps), run(Nothing{}, &ordinary, steps)));
    CHECK(early == ordinary);
    CHECK(early == (steps == 1 ? 3 : 2));
  }
}

TEST_CASE("OptimizerInBackward: a loss scale is refused before any update") {
  auto model = large_model();
  ga::optim::SGD sgd(model->parameters(), 0.1);
  const auto before = flat(model);
  struct Scales {
    void before_backward(ga::Loss& loss) const { loss.seed.require_finite(); }
  };
  struct Unscales {
    void scale_gradients(ga::Factor& factor) const { factor.require_finite(); }
  };
  const std::string sentence = "use bfloat16, which needs no scaler, or turn in_backward off";
  REQUIRE_ERROR(sentence, trainer_with(model, sgd, ga::OptimizerInBackward{}, Scales{}));
  REQUIRE_ERROR(sentence, trainer_with(model, sgd, Unscales{}, ga::OptimizerInBackward{}));
  REQUIRE_ERROR(sentence, trainer_with(model, sgd, ga::OptimizerInBackward{}, ga::MixedPrecision{.dtype = at::kHalf}));
  REQUIRE_ERROR(sentence, trainer_with(model, sgd, ga::MixedPrecision{.dtype = at::kHalf}, ga::Accumulate{.steps = 2},
                                       ga::OptimizerInBackward{}));
  CHECK(at::equal(flat(model), before));
  trainer_with(model, sgd, ga::OptimizerInBackward{},
               ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.enabled = false}});
  CHECK_FALSE(at::equal(flat(model), before));
}

TEST_CASE("OptimizerInBackward: which hooks it refuses") {
  using Model = torch::nn::Sequential;
  using Allowed = ga::Trainer<Model, ga::optim::SGD, decltype(objective), ga::OptimizerInBackward, ga::Accumulate,
                              ga::Ema, ga::MixedPrecision, ga::MetricsLog, ga::Progress>;
  static_assert(!Allowed::has<ga::hooks::before_step>);
  static_assert(Allowed::has<ga::hooks::after_step>);
  struct DerivedClip : ga::ClipNorm {};
  static_assert(ga::Trainer<Model, ga::optim::SGD, decltype(objective), DerivedClip>::has<ga::hooks::before_step>);
  static_assert(!ga::Trainer<Model, ga::optim::SGD, decltype(objective)>::has<ga::hooks::before_step>);
  SUCCEED();
}

TEST_CASE("OptimizerInBackward: an optimizer that does not take gradients is refused when the trainer is built") {
  auto model = large_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  REQUIRE_ERROR("in_backward needs an optimizer that takes gradients",
                ga::Trainer(model, sgd, objective, ga::OptimizerInBackward{}));
}

TEST_CASE("OptimizerInBackward: after an exception in a callback, or between backward and step, training continues") {
  auto model = large_model();
  ga::optim::SGD sgd(model->parameters(), 0.1);
  bool armed = true;
  struct Breaks {
    bool* armed;
    void after_backward(ga::Gradients& gradients) {
      if (std::exchange(*armed, false)) gradients.norm();
    }
  };
  ga::Trainer trainer(model, sgd, objective, ga::OptimizerInBackward{}, Breaks{&armed});
  const auto batches = make_batches({3, 5}, at::kFloat);
  REQUIRE_ERROR("with in_backward, the gradients of this window were freed", trainer.step(batches[0]));
  CHECK(trainer.window().micro_batches == 0);
  const auto before = flat(model);
  CHECK(trainer.step(batches[1]));
  CHECK_FALSE(at::equal(flat(model), before));
  CHECK(trainer.updates() == 1);
}
