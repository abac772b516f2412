// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/multi_optimizer.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/trainer.hpp>
#include <gradaccum/training_state.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

// The oracle of a rejected window is the same training without its batches, bit for bit.

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Makes batches of which one has targets a million times as large.
std::vector<Example> batches_with_bad_at(std::size_t count, std::size_t place, at::ScalarType dtype = at::kDouble) {
  auto batches = make_batches(std::vector<std::int64_t>(count, 5), dtype);
  batches[place].target *= 1e6;
  return batches;
}

std::vector<Example> without(std::vector<Example> batches, std::size_t first, std::size_t number = 1) {
  const auto from = batches.begin() + static_cast<std::ptrdiff_t>(first);
  batches.erase(from, from + static_cast<std::ptrdiff_t>(number));
  return batches;
}

const auto objective = [](auto& model, auto& batch) { return loss_of(model, batch); };

/// For a batch of one row the loss is finite, and the first parameter's gradient is NaN.
const auto nan_for_one_row = [](auto& model, auto& batch) {
  const auto output = model->forward(batch.data);
  const auto loss = torch::mse_loss(output.to(batch.target.scalar_type()), batch.target);
  const auto weight = model->parameters()[0];
  return batch.data.size(0) > 1 ? loss : loss + (weight - weight.detach()).square().sum().sqrt();
};

struct Outcome {
  torch::nn::Sequential model = make_model();
  ga::FitReport report;
  std::vector<ga::Step> windows;
  at::Tensor averages;
};

struct WindowsIn {
  std::vector<ga::Step>& steps;
  void after_window(const ga::Step& step) { steps.push_back(step); }
};

/// Trains by AdamW with a schedule, an average and clipping.
template <class... Policies>
Outcome trained(const std::vector<Example>& batches, std::int64_t steps, Policies... policies) {
  Outcome outcome;
  ga::optim::AdamW adamw(outcome.model->parameters(), 0.1);
  ga::Trainer trainer(outcome.model, adamw, objective, ga::Accumulate{.steps = steps},
                      ga::Schedule{ga::lr::Linear{.peak = 0.1, .warmup = 2, .total = 10}}, ga::Ema{.decay = 0.5},
                      WindowsIn{outcome.windows}, std::move(policies)...);
  outcome.report = trainer.fit(batches);
  auto& kept = trainer.template policy<ga::Ema>();
  const auto weights = flat(outcome.model);
  kept.swap(outcome.model);
  outcome.averages = flat(outcome.model);
  kept.swap(outcome.model);
  REQUIRE(torch::equal(flat(outcome.model), weights));
  return outcome;
}

/// A function, since g++ 12 fails on enumerators of `using enum` in generic lambdas.
bool was_rejected(ga::StepResult result) { return result == ga::StepResult::rejected; }

/// Passes a window of one number as its norm, and returns whether it was rejected.
bool rejects(ga::GuardNorm::Running& guard, double norm) {
  auto parameter = torch::zeros({1}, at::kDouble).requires_grad_();
  parameter.mutable_grad() = torch::full({1}, norm, at::kDouble);
  ga::Gradients gradients({parameter});
  guard.before_step(gradients);
  return gradients.rejected().has_value();
}

}  // namespace

TEST_CASE("GuardNorm: a rejected window leaves a training as if its batches had not been there, bitwise") {
  const std::int64_t steps = GENERATE(1, 2);
  const auto guard = GENERATE(ga::GuardNorm{.max = 50.0}, ga::GuardNorm{.max_ratio = 20.0, .history = 4});
  const bool clips = GENERATE(false, true), first = GENERATE(false, true);
  const auto clip = clips ? std::optional(ga::ClipNorm{.max = 0.1}) : std::nullopt;
  const auto batches = batches_with_bad_at(10, 6);
  const auto guarded = first ? trained(batches, steps, guard, clip) : trained(batches, steps, clip, guard);
  const auto oracle = trained(without(batches, 6, static_cast<std::size_t>(steps)), steps, clip);
  CHECK(torch::equal(flat(guarded.model), flat(oracle.model)));
  CHECK(torch::equal(guarded.averages, oracle.averages));
  CHECK(guarded.report.updates == oracle.report.updates);
  CHECK(guarded.report.rejected == 1);
  CHECK(guarded.report.skipped == 1);
  CHECK(guarded.report.nan_batches == 0);
  const auto place = steps == 1 ? "batch 6 of epoch 0 (both counted from 0), in update 7: a gradient norm of "
                                : "one of the 2 batches up to batch 7 of epoch 0 (both counted from 0), in update 4: ";
  CHECK(contains(guarded.report.first_rejected, place));
  std::ostringstream text;
  text << guarded.report;
  CHECK(contains(text.str(), "Windows rejected: 1, the first for " + guarded.report.first_rejected + "\n"));
  const auto& rejected = guarded.windows[static_cast<std::size_t>(6 / steps)];
  CHECK((rejected.rejected && !rejected.moved && !rejected.overflowed));
  CHECK(rejected.grad_norm.item<double>() > 1000);

  const auto unguarded = trained(batches, steps, clip);
  CHECK(distance(unguarded.model, oracle.model) > 1e-3);
  CHECK(unguarded.report.rejected == 0);
}

TEST_CASE("GuardNorm: the limit is a multiple of the quantile of the last norms, once half of them are known") {
  ga::GuardNorm::Running guard({.max_ratio = 3.0, .quantile = 0.25, .history = 4});
  CHECK(guard.limit() == infinity);
  CHECK_FALSE(rejects(guard, 100));
  CHECK(guard.limit() == infinity);
  CHECK_FALSE(rejects(guard, 1));
  CHECK(guard.limit() == Approx(3 * (1 + 0.25 * 99)));  // torch.quantile([1, 100], 0.25) = 25.75
  CHECK_FALSE(rejects(guard, 2));
  CHECK_FALSE(rejects(guard, 3));
  CHECK(guard.limit() ==
        Approx(3 * torch::quantile(torch::tensor({100., 1., 2., 3.}, at::kDouble), 0.25).item<double>()));
  CHECK_FALSE(rejects(guard, guard.limit()));  // the limit itself is allowed
  CHECK(rejects(guard, std::nextafter(guard.limit(), infinity)));
  CHECK(guard.norms().size() == 4);

  guard.max = 1.5;
  CHECK(guard.limit() == 1.5);
  guard.history = 0;
  REQUIRE_ERROR("GuardNorm: history must be >= 1, got 0", guard.limit());
}

TEST_CASE("GuardNorm: if all norms become large, training resumes") {
  ga::GuardNorm::Running guard({.max_ratio = 3.0, .history = 8});
  for (int i = 0; i < 8; ++i) REQUIRE_FALSE(rejects(guard, 1.0));
  int rejected = 0;
  while (rejects(guard, 100.0) && rejected < 9) ++rejected;
  CHECK(rejected == 4);  // the median then is 50.5
}

TEST_CASE("GuardNorm: norms of 0, NaN and infinity are not kept, and the last two are rejected") {
  ga::GuardNorm::Running guard({.max_ratio = 3.0, .history = 2});
  CHECK_FALSE(rejects(guard, 0.0));
  CHECK(rejects(guard, std::nan("")));
  CHECK(rejects(guard, -infinity));
  CHECK(guard.norms().empty());
  CHECK_FALSE(rejects(guard, 7.0));
  CHECK(guard.norms() == std::vector<double>{7.0});
}

TEST_CASE("GuardNorm: options are checked before training") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  const auto check = [&](ga::GuardNorm guard) { ga::Trainer(model, sgd, objective, guard); };
  REQUIRE_ERROR("GuardNorm: max must be > 0, got 0", check({.max = 0.0}));
  REQUIRE_ERROR("GuardNorm: max must be > 0, got nan", check({.max = std::nan("")}));
  REQUIRE_ERROR("GuardNorm: max_ratio must be > 0, got -1", check({.max_ratio = -1.0}));
  REQUIRE_ERROR("GuardNorm: max or max_ratio must be finite", check({}));
  REQUIRE_ERROR("GuardNorm: quantile must be in [0, 1], got 1.5", check({.max = 1.0, .quantile = 1.5}));
  REQUIRE_ERROR("GuardNorm: history must be >= 1, got 0", check({.max = 1.0, .history = 0}));
}

TEST_CASE("GuardNorm: in a loop of one's own, with any optimizer") {
  const auto batches = batches_with_bad_at(9, 4);
  const auto loop = [&](auto make, const std::vector<Example>& of, std::optional<ga::GuardNorm::Running> guarded,
                        std::int64_t* rejected) {
    auto model = make_model();
    auto optimizer_of = make(model);
    ga::GradAccumulator optimizer(*optimizer_of, {.steps = 1});
    for (auto& batch : of) {
      optimizer.backward(loss_of(model, batch));
      if (guarded && optimizer.ready()) guarded->before_step(optimizer.gradients());
      optimizer.clip_grad_norm_(1.0);
      *rejected += was_rejected(optimizer.step());
      optimizer.zero_grad();
    }
    CHECK(optimizer.updates() == std::int64_t(of.size()) - *rejected);
    return flat(model);
  };
  const ga::GuardNorm::Running guard({.max = 100.0});
  const auto check = [&](auto make) {
    std::int64_t rejected = 0, none = 0;
    const auto guarded = loop(make, batches, guard, &rejected);
    CHECK(torch::equal(guarded, loop(make, without(batches, 4), std::nullopt, &none)));
    CHECK((rejected == 1 && none == 0));
    CHECK_FALSE(torch::equal(guarded, loop(make, batches, std::nullopt, &none)));
  };
  check([](auto& model) {
    return std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  });
  check([](auto& model) { return std::make_unique<torch::optim::Adam>(model->parameters(), 0.1); });
  check([](auto& model) {
    return std::make_unique<ga::optim::SGD>(model->parameters(), ga::optim::SGDOptions(0.1).momentum(0.9));
  });
  check([](auto& model) { return std::make_unique<ga::optim::AdamW>(model->parameters(), 0.1); });
}

TEST_CASE(
    "Gradients: a rejected window moves no member of a MultiOptimizer, nor an optimizer that is stepped by hand") {
  auto model = make_model();
  const auto all = model->parameters();
  ga::optim::AdamW biases({all[1], all[3]}, 0.1);
  torch::optim::SGD weights(std::vector<at::Tensor>{all[0], all[2]}, 0.1);
  ga::optim::MultiOptimizer both(biases, weights);
  ga::GradAccumulator optimizer(both);
  const auto batches = make_batches({5, 5});
  const auto before = flat(model);
  optimizer.backward(loss_of(model, batches[0]));
  optimizer.gradients().reject("a test");
  CHECK(*optimizer.gradients().rejected() == "a test");
  CHECK(optimizer.step() == ga::StepResult::rejected);
  optimizer.zero_grad();
  CHECK(torch::equal(flat(model), before));
  CHECK(biases.state().empty());
  optimizer.backward(loss_of(model, batches[0]));
  CHECK_FALSE(optimizer.gradients().rejected());
  CHECK(optimizer.step() == ga::StepResult::stepped);
  optimizer.zero_grad();

  const auto after = flat(model);
  loss_of(model, batches[1]).backward();
  ga::Gradients gradients(biases.parameters());
  gradients.reject();
  biases.step(gradients);
  ga::Gradients of_both(all);
  of_both.reject();
  both.step(of_both);
  CHECK(torch::equal(flat(model), after));
}

TEST_CASE("Gradients: only a complete and open window can be rejected") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  const auto batches = make_batches({5, 5, 5});
  optimizer.backward(loss_of(model, batches[0]));
  REQUIRE_ERROR("reject() is for a complete window", optimizer.gradients().reject());
  optimizer.step();
  optimizer.backward(loss_of(model, batches[1]));
  auto gradients = optimizer.gradients();
  CHECK(optimizer.step());
  REQUIRE_ERROR("this window is closed", gradients.reject());
  optimizer.zero_grad();
  optimizer.backward(loss_of(model, batches[2]));
  optimizer.discard();  // an open window is dropped
  CHECK(optimizer.micro_steps() == 0);
}

TEST_CASE("GuardNorm: a loss scale neither grows nor shrinks by a rejected window, and shrinks by an overflow") {
  auto batches = batches_with_bad_at(4, 1, at::kFloat);
  batches[1].target /= 1e3;  // no overflow in float16
  batches[3] = joined(make_batches({1}, at::kFloat), 0, 1);
  const bool in_trainer = GENERATE(true, false);
  auto model = make_model(at::kFloat);
  ga::optim::SGD sgd(model->parameters(), ga::optim::SGDOptions(0.01).momentum(0.9));
  std::map<std::string, double> states[4];
  std::vector<ga::StepResult> results;
  const ga::GuardNorm guard{.max = 20.0};
  if (in_trainer) {
    struct Watch {
      ga::TrainerBase* trainer = nullptr;
      std::vector<ga::StepResult>& results;
      void attach(ga::TrainerBase& to) { trainer = &to; }
      void after_window(const ga::Step& step) {
        results.push_back(step.moved        ? ga::StepResult::stepped
                          : step.overflowed ? ga::StepResult::skipped
                                            : ga::StepResult::rejected);
      }
    };
    ga::Trainer trainer(model, sgd, nan_for_one_row,
                        ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 4.0, .growth_interval = 3}},
                        guard, Watch{nullptr, results});
    for (std::size_t i = 0; i < 4; ++i) {
      trainer.step(batches[i]);
      states[i] = trainer.policy<ga::MixedPrecision>().amp_scaler().state_dict();
    }
  } else {
    ga::GradAccumulator optimizer(sgd);
    ga::AmpScaler scaler({.init_scale = 4.0, .growth_interval = 3});
    ga::GuardNorm::Running by_hand(guard);
    for (std::size_t i = 0; i < 4; ++i) {
      scaler.scale(nan_for_one_row(model, batches[i])).backward();
      scaler.unscale_(optimizer);
      by_hand.before_step(optimizer.gradients());
      results.push_back(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
      states[i] = scaler.state_dict();
    }
  }
  using enum ga::StepResult::Kind;
  CHECK(results == std::vector<ga::StepResult>{stepped, rejected, stepped, skipped});
  CHECK(states[0]["_growth_tracker"] == 1);
  CHECK(states[1] == states[0]);
  CHECK((states[2]["_growth_tracker"] == 2 && states[2]["scale"] == 4));
  CHECK((states[3]["_growth_tracker"] == 0 && states[3]["scale"] == 2));
  CHECK(torch::isfinite(flat(model)).all().item<bool>());
}

TEST_CASE("GuardNorm: non-finite gradients are left to OnNan; a fit without updates says why") {
  auto batches = make_batches({5, 1, 5});
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  ga::Trainer trainer(model, sgd, nan_for_one_row, ga::GuardNorm{.max = 1e-9});
  const auto report = trainer.fit(batches, {.epochs = 1, .on_nan = ga::OnNan::skip});
  CHECK((report.updates == 0 && report.skipped == 3 && report.rejected == 2 && report.nan_batches == 1));
  REQUIRE_ERROR("the gradients must be finite", trainer.fit(batches));
  REQUIRE_ERROR("made none: windows were rejected, the first for batch 0 of epoch 2",
                trainer.fit(make_batches({5, 5}), {.updates = 3}));
  const auto before = flat(model);
  const auto ignored = trainer.fit(batches, {.on_nan = ga::OnNan::ignore});
  CHECK((ignored.rejected == 3 && torch::equal(flat(model), before)));
  ga::Trainer by_ratio(model, sgd, nan_for_one_row, ga::GuardNorm{.max_ratio = 1e9});
  CHECK(by_ratio.fit(batches, {.on_nan = ga::OnNan::ignore}).first_rejected ==
        "batch 1 of epoch 0 (both counted from 0), in update 2: a gradient norm of NaN or infinity");
}

namespace {

struct RejectThird {
  std::int64_t seen = 0;
  void before_step(ga::Gradients& gradients) {
    if (++seen == 3) gradients.reject();
  }
};

}  // namespace

TEST_CASE("Trainer: a policy of one's own rejects windows, without a reason and inside step") {
  auto model = make_model(), oracle = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1), oracle_sgd(oracle->parameters(), 0.1);
  const auto batches = make_batches({5, 5, 5, 5});
  ga::Trainer trainer(model, sgd, objective, RejectThird{});
  ga::Trainer plain(oracle, oracle_sgd, objective);
  std::vector<bool> moved;
  for (auto& batch : batches) moved.push_back(trainer.step(batch));
  CHECK(moved == std::vector<bool>{true, true, false, true});
  plain.fit(without(batches, 2));
  CHECK(torch::equal(flat(model), flat(oracle)));
  CHECK(trainer.updates() == 3);
}

TEST_CASE("GuardNorm: ranks reject the same windows, and train like one process") {
  const auto shard = GENERATE(ga::Shard::none, ga::Shard::optimizer, ga::Shard::gradients);
  const bool clips = GENERATE(false, true);
  const auto batches = batches_with_bad_at(12, 7);  // rank 1's fourth
  const auto fit = [&](const ga::ProcessGroup& group, torch::nn::Sequential& model) {
    std::vector<Example> own;
    for (std::size_t i = 0; i < batches.size(); ++i)
      if (static_cast<int>(i % static_cast<std::size_t>(group.world_size())) == group.rank()) own.push_back(batches[i]);
    ga::optim::AdamW adamw(model->parameters(), 0.1);
    ga::Trainer trainer(model, adamw, objective, ga::Accumulate{.steps = 2 / group.world_size()},
                        ga::GuardNorm{.max_ratio = 10.0, .history = 4},
                        clips ? std::optional(ga::ClipNorm{.max = 1.0}) : std::nullopt,
                        ga::DataParallel{.group = group, .shard = shard, .check_every = 1});
    return trainer.fit(own, {.epochs = 2});
  };
  auto one = make_model();
  const auto alone = fit({}, one);
  CHECK(alone.rejected == 2);
  std::vector<torch::nn::Sequential> models{make_model(), make_model()};
  std::vector<ga::FitReport> reports(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    reports[rank] = fit(group, models[rank]);
  });
  CHECK(torch::equal(flat(models[0]), flat(models[1])));
  CHECK(distance(models[0], one) < 1e-9);
  for (auto& report : reports) {
    CHECK(report.rejected == 2);
    CHECK(report.updates == alone.updates);
    CHECK(contains(report.first_rejected, "batch 3 of epoch 0"));
    CHECK(contains(report.first_rejected, "of this process or of another: a gradient norm of "));
  }
}

TEST_CASE("Gradients: ranks that reject different windows stop with an error") {
  const auto shard = GENERATE(ga::Shard::none, ga::Shard::optimizer, ga::Shard::gradients);
  std::vector<std::string> errors(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto model = make_model();
    ga::optim::AdamW adamw(model->parameters(), 0.1);
    std::optional<RejectThird> rejects;
    if (group.rank() == 1) rejects.emplace();
    ga::Trainer trainer(model, adamw, objective, rejects, ga::DataParallel{.group = group, .shard = shard});
    try {
      trainer.fit(make_batches({5, 5, 5, 5, 5}));
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(group.rank())] = error.what();
    }
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CAPTURE(shard);
    CHECK(contains(errors[rank], "all ranks must reject the same windows, but this one has rejected " +
                                     std::to_string(rank) + " and all 2 together 1"));
  }
}

TEST_CASE("GuardNorm: a training resumes bitwise with its norms and what it has rejected") {
  auto batches = batches_with_bad_at(12, 2);
  batches[9].target *= 1e6;
  const auto fit = [&](const std::filesystem::path& folder, std::optional<std::int64_t> updates) {
    auto model = make_model();
    ga::optim::AdamW adamw(model->parameters(), 0.1);
    ga::Trainer trainer(model, adamw, objective, ga::GuardNorm{.max = 1000.0, .max_ratio = 30.0, .history = 6},
                        ga::SaveState{.directory = folder, .every_updates = 1});
    const auto report = trainer.fit(batches, {.epochs = 1, .updates = updates, .resume = folder});
    return std::tuple(flat(model), report, trainer.policy<ga::GuardNorm>().norms());
  };
  const Directory directory;
  const auto [weights, report, norms] = fit(directory / "whole", std::nullopt);
  CHECK(report.rejected == 2);
  for (std::int64_t updates = 1; updates < 10; ++updates) {
    CAPTURE(updates);
    const auto folder = directory / std::to_string(updates);
    fit(folder, updates);
    const auto [resumed_weights, resumed, resumed_norms] = fit(folder, std::nullopt);
    CHECK(torch::equal(resumed_weights, weights));
    CHECK(resumed_norms == norms);
    CHECK(resumed.rejected == 2);
    CHECK(resumed.first_rejected == report.first_rejected);
  }
}

TEST_CASE("GuardNorm: a state's norms are checked before they are used") {
  const auto load = [](const at::Tensor& norms, std::int64_t history) {
    ga::Archive archive(ga::Archive::Values{{"norms", norms}});
    ga::GuardNorm::Running guard({.max = 1.0, .history = history});
    REQUIRE_FALSE(rejects(guard, 0.5));
    try {
      guard.state(archive);
    } catch (...) {
      CHECK(guard.norms() == std::vector<double>{0.5});
      throw;
    }
    return guard.norms();
  };
  CHECK(load(torch::tensor({1., 2., 3.}, at::kDouble), 2) == std::vector<double>{2.0, 3.0});
  CHECK(load(torch::empty({0}, at::kDouble), 2).empty());
  REQUIRE_ERROR("finite and > 0, got inf", load(torch::tensor({1., infinity}, at::kDouble), 2));
  REQUIRE_ERROR("finite and > 0, got -1", load(torch::tensor({-1.}, at::kDouble), 2));
  REQUIRE_ERROR("must be a vector of float64", load(torch::ones({2, 2}, at::kDouble), 2));
  REQUIRE_ERROR("must be a vector of float64", load(torch::ones({2}), 2));
  REQUIRE_ERROR("must be a vector of float64", load(torch::tensor(1.0, at::kDouble), 2));
}
