// SPDX-License-Identifier: Apache-2.0
// Compiled with -ffast-math, which makes std::isnan(x) false. The library must still find non-finite numbers.
#include "support/catch.hpp"

#include <gradaccum/gradaccum.hpp>

#include "support/files.hpp"
#include "support/models.hpp"

#include <bit>
#include <limits>
#include <sstream>

#ifndef __FAST_MATH__
#error "this test is one of programs with -ffast-math"
#endif

namespace ga = gradaccum;
using namespace testing;

namespace {

// Numbers that the compiler cannot predict, and a test of their bits.
double made(std::uint64_t bits) {
  volatile std::uint64_t hidden = bits;
  return std::bit_cast<double>(std::uint64_t(hidden));
}
double nan_() { return made(0x7ff8000000000000); }
double infinity() { return made(0x7ff0000000000000); }
bool is_nan(const at::Tensor& number) { return number.isnan().any().item<bool>(); }
bool is_nan(double number) { return is_nan(torch::full({}, number, at::kDouble)); }

struct Probe : torch::nn::Module {
  at::Tensor parameter = register_parameter("parameter", torch::zeros({3}));
  ga::optim::AdamW adamw{parameters(), 0.1};
};
const auto slope = [](Probe& probe, double by) { return (probe.parameter * by).sum(); };
const auto offset = [](Probe& probe, double value) { return probe.parameter.sum() + value; };

}  // namespace

TEST_CASE("-ffast-math: a Trainer stops at a loss or gradient that is not finite") {
  for (const double bad : {nan_(), infinity(), -infinity()}) {
    Probe probe;
    ga::Trainer of_loss(probe, probe.adamw, offset);
    REQUIRE_ERROR("the loss must be finite", of_loss.fit(std::vector<double>{bad}));
    CHECK(of_loss.fit(std::vector<double>{1.0, bad}, {.on_nan = ga::OnNan::skip}).nan_batches == 1);
    struct Spoil {
      double by;
      void before_step(ga::Gradients& gradients) const { gradients.values()[0].add_(by); }
    };
    ga::Trainer of_gradient(probe, probe.adamw, slope, Spoil{bad});
    REQUIRE_ERROR("the gradients must be finite", of_gradient.fit(std::vector<double>{1.0}));
    CHECK(probe.parameter.isfinite().all().item<bool>());
  }
}

TEST_CASE("-ffast-math: an overflow is skipped, and halves the scale") {
  for (const double bad : {nan_(), infinity()}) {
    Probe probe;
    ga::AmpScaler scaler({.init_scale = 1024.0});
    scaler.scale(slope(probe, bad)).backward();
    CHECK(scaler.step(probe.adamw) == ga::StepResult::skipped);
    scaler.update();
    CHECK(scaler.get_scale() == 512.0);
    CHECK(probe.parameter.eq(0).all().item<bool>());
  }
  ga::AmpScaler grows({.init_scale = 0x1p127, .growth_interval = 1});
  Probe probe;
  grows.scale(slope(probe, 0.0)).backward();
  grows.step(probe.adamw);
  grows.update();
  CHECK(grows.get_scale() == 0x1p127);  // twice that exceeds float
}

TEST_CASE("-ffast-math: the best number is found, and NaN does not count") {
  ga::EarlyStopping::Running stopping({.patience = 2});
  CHECK(is_nan(stopping.best()));
  CHECK_FALSE(stopping.add(0.9));
  CHECK_FALSE(stopping.add(0.7));
  CHECK_FALSE(stopping.add(nan_()));
  CHECK(stopping.best() == 0.7);
  CHECK(stopping.add(0.8));
  stopping = ga::EarlyStopping::Running({.patience = 2});
  CHECK(is_nan(stopping.best()));
  CHECK_FALSE(stopping.add(5.0));
  CHECK(stopping.best() == 5.0);
  CHECK(is_nan(ga::Accuracy{}.value()));
}

TEST_CASE("-ffast-math: gradients are clipped, and infinity only measures") {
  const auto parameter = torch::zeros({2}).requires_grad_();
  parameter.mutable_grad() = torch::tensor({3.0f, 4.0f});
  CHECK(ga::clip_grad_norm_({parameter}, infinity()).item<double>() == 5.0);
  CHECK(parameter.grad()[1].item<double>() == 4.0);
  parameter.mutable_grad()[0] = infinity();
  CHECK(ga::Gradients({parameter}).found_inf().item<float>() == 1);
  REQUIRE_ERROR("the norm must be finite", ga::clip_grad_norm_({parameter}, 1.0, 2.0, /*error_if_nonfinite=*/true));
}

TEST_CASE("-ffast-math: numbers that must be finite are refused") {
  Probe probe;
  ga::LearningRates rates(probe.adamw);
  REQUIRE_ERROR("must be finite", rates.set(nan_()));
  REQUIRE_ERROR("must be finite", rates.set(infinity()));
  ga::GradAccumulator optimizer(probe.adamw);
  REQUIRE_ERROR("items must be finite", optimizer.backward({probe.parameter.sum(), nan_()}));
  REQUIRE_ERROR("items must be finite", optimizer.backward({probe.parameter.sum(), infinity()}));
  REQUIRE_ERROR("growth_factor must be > 1", ga::AmpScaler({.growth_factor = infinity()}));
}

TEST_CASE("-ffast-math: non-finite numbers are written correctly") {
  const Directory directory;
  {
    ga::MetricsFile json({.path = directory / "a.jsonl"}), csv({.path = directory / "a.csv"});
    for (auto* const file : {&json, &csv}) file->write({{"a", nan_()}, {"b", infinity()}, {"c", 0.5}});
  }
  CHECK(text_of(directory / "a.jsonl") == "{\"a\": null, \"b\": null, \"c\": 0.5}\n");
  CHECK(text_of(directory / "a.csv") == "a,b,c\nnan,inf,0.5\n");

  struct Training {
    ga::EarlyStopping::Running stopping{{}};
    std::int64_t updates() const { return 1; }
    void state(ga::Archive& archive) { archive("stopping", stopping); }
  } saved, loaded;
  loaded.stopping.add(1);
  ga::save(directory / "state", saved);
  ga::load(directory / "state", loaded);
  CHECK(is_nan(loaded.stopping.best()));

  std::ostringstream text;
  text << ga::Evaluation{.metrics = {{"a", infinity()}, {"b", nan_()}, {"c", 0.5}}};
  CHECK(text.str() == "a: inf, b: nan, c: 0.500000");

  ga::Curve curve;
  curve.add(1, 2.0);
  curve.add(2, nan_());
  curve.add(3, infinity());
  REQUIRE(curve.pieces().size() == 3);
  CHECK(curve.pieces()[0].mean == 2.0);
  for (const std::size_t i : {1, 2}) CHECK(curve.pieces()[i].gaps == 1);
}

TEST_CASE("-ffast-math: a block of moments of 8 bits with a number that is not finite is not finite") {
  for (const double bad : {nan_(), infinity()}) {
    auto parameter = torch::zeros({8192}).requires_grad_();
    ga::optim::AdamW8bit adamw({parameter}, 0.1);
    for (int step = 0; step < 2; ++step) {
      parameter.mutable_grad() = torch::ones({8192});
      if (step == 0) parameter.mutable_grad()[300] = bad;
      adamw.step();
    }
    CHECK(is_nan(parameter.narrow(0, 256, 256)));
    CHECK_FALSE(is_nan(parameter.narrow(0, 0, 256)));
    CHECK(parameter.narrow(0, 256, 256).isnan().all().item<bool>());
  }
}

TEST_CASE("-ffast-math: non-finite gradients equal no others") {
  auto model = make_model();
  const auto batches = make_batches({4});
  const auto report = ga::verify_accumulation(
      model, [](auto& net, auto& batch) { return loss_of(net, batch) * nan_(); }, batches[0], {.steps = 2});
  CHECK_FALSE(report.exact());
}
