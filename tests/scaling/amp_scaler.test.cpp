// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/grad_accumulator.hpp>

#include "support/breaks.hpp"
#include "support/models.hpp"
#include "support/warnings.hpp"

#include <ATen/ops/_amp_update_scale.h>

#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

// A loop with a scaler gives the parameters of the loop without, except for overflows, which it skips. Tests any
// optimizer with one batch per step; amp_scaler_windows.test.cpp tests windows.

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity(), not_a_number = std::numeric_limits<float>::quiet_NaN();

static_assert(!std::is_copy_constructible_v<ga::AmpScaler> && !std::is_copy_assignable_v<ga::AmpScaler>);

void fill_gradient(const at::Tensor& parameter, float value) {
  at::NoGradGuard no_grad;
  parameter.mutable_grad().fill_(value);
}

// Two layers and SGD: one side of a comparison.
struct Side {
  torch::nn::Sequential model = make();
  torch::optim::SGD sgd{model->parameters(), torch::optim::SGDOptions(1.0)};

  static torch::nn::Sequential make() {
    torch::manual_seed(3);
    return torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
  }
  void overflow() { fill_gradient(model->parameters()[2], inf); }
};

std::vector<Example> batches_of_8() {
  torch::manual_seed(7);
  std::vector<Example> batches;
  for (int i = 0; i < 4; ++i) batches.emplace_back(torch::randn({8, 8}), torch::randn({8, 8}));
  return batches;
}

constexpr std::size_t spoiled = 2;  // the batch whose gradients overflow

// Runs `loop(side, scaler)` with an enabled and with a disabled scaler, and `control(side, leave_out)` without one.
template <class Loop, class Control>
void scaling_case(Loop loop, Control control, int unskipped = 3, int skipped = 1, double tolerance = 1e-6) {
  for (bool enabled : {true, false}) {
    INFO("enabled " << enabled);
    Side scaled, plain;
    ga::AmpScaler scaler({.init_scale = 128, .growth_factor = 2, .growth_interval = 1, .enabled = enabled});
    loop(scaled, scaler);
    control(plain, enabled && skipped > 0);
    CHECK(scaler.get_scale() == (enabled ? 128 * std::pow(2.0, unskipped) * std::pow(0.5, skipped) : 1.0));
    CHECK(distance(scaled.model, plain.model) < tolerance);
    // Control: with the overflowing batch, or without skipping a step, the result would differ.
    Side other;
    control(other, !(enabled && skipped > 0));
    CHECK(distance(scaled.model, other.model) > 1e-4);
  }
}

// The loop without a scaler.
template <class Step>
auto control_loop(Step step) {
  return [=](Side& side, bool leave_out) {
    const auto data = batches_of_8();
    for (std::size_t i = 0; i < data.size(); ++i) {
      side.sgd.zero_grad();
      loss_of(side.model, data[i]).backward();
      step(side);
      if (!(leave_out && i == spoiled)) side.sgd.step();
    }
  };
}
void nothing(Side&) {}

template <class Before>
auto scaled_loop(Before before_step) {
  return [=](Side& side, ga::AmpScaler& scaler) {
    const auto data = batches_of_8();
    for (std::size_t i = 0; i < data.size(); ++i) {
      side.sgd.zero_grad();
      scaler.scale(loss_of(side.model, data[i])).backward();
      if (i == spoiled && scaler.is_enabled()) side.overflow();
      before_step(side, scaler);
      CHECK(scaler.step(side.sgd) == !(i == spoiled && scaler.is_enabled()));
      scaler.update();
    }
  };
}

// One parameter whose gradient is `slope` times the scale.
struct One {
  at::Tensor weight = torch::zeros({2}).set_requires_grad(true);
  torch::optim::SGD sgd{{weight}, torch::optim::SGDOptions(1.0)};
  ga::AmpScaler scaler{{.init_scale = 8, .growth_interval = 2}};

  void backward(double slope = 2) { scaler.scale((weight * slope).sum()).backward(); }
  double value() const { return weight[0].item<double>(); }
  double tracker() const { return scaler.state_dict().at("_growth_tracker"); }
};

}  // namespace

TEST_CASE("AmpScaler: a loop updates the parameters as without it, and skips overflows") {
  scaling_case(scaled_loop([](Side&, ga::AmpScaler&) {}), control_loop(nothing));
}

TEST_CASE("AmpScaler: clipping scaled gradients by a scaled norm") {
  scaling_case(scaled_loop([](Side& side, ga::AmpScaler& scaler) {
                 torch::nn::utils::clip_grad_norm_(side.model->parameters(), 0.2 * scaler.get_scale());
               }),
               control_loop([](Side& side) { torch::nn::utils::clip_grad_norm_(side.model->parameters(), 0.2); }));
}

TEST_CASE("AmpScaler: clipping after unscale_") {
  scaling_case(scaled_loop([](Side& side, ga::AmpScaler& scaler) {
                 scaler.unscale_(side.sgd);
                 torch::nn::utils::clip_grad_norm_(side.model->parameters(), 0.2);
               }),
               control_loop([](Side& side) { torch::nn::utils::clip_grad_norm_(side.model->parameters(), 0.2); }));
}

TEST_CASE("AmpScaler: a gradient penalty, a backward of a backward") {
  const auto penalised = [](const at::Tensor& loss, const std::vector<at::Tensor>& gradients) {
    at::Tensor norm = torch::zeros({});
    for (auto& gradient : gradients) norm = norm + gradient.square().sum();
    return loss + norm.sqrt();
  };
  const auto grad = [](const at::Tensor& loss, Side& side) {
    return torch::autograd::grad({loss}, side.model->parameters(), {}, /*retain_graph=*/true, /*create_graph=*/true);
  };
  const auto loop = [&](Side& side, ga::AmpScaler& scaler) {
    const auto data = batches_of_8();
    for (std::size_t i = 0; i < data.size(); ++i) {
      side.sgd.zero_grad();
      auto loss = loss_of(side.model, data[i]);
      auto gradients = grad(scaler.scale(loss), side);
      for (auto& gradient : gradients) gradient = gradient / scaler.get_scale();
      scaler.scale(penalised(loss, gradients)).backward();
      if (i == spoiled && scaler.is_enabled()) side.overflow();
      scaler.step(side.sgd);
      scaler.update();
    }
  };
  const auto control = [&](Side& side, bool leave_out) {
    const auto data = batches_of_8();
    for (std::size_t i = 0; i < data.size(); ++i) {
      side.sgd.zero_grad();
      auto loss = loss_of(side.model, data[i]);
      penalised(loss, grad(loss, side)).backward();
      if (!(leave_out && i == spoiled)) side.sgd.step();
    }
  };
  scaling_case(loop, control, 3, 1, 1e-5);
}

TEST_CASE("AmpScaler: micro-batches summed by hand, a step and an update for every second one") {
  const auto loop = [](Side& side, ga::AmpScaler& scaler) {
    const auto data = batches_of_8();
    for (std::size_t i = 0; i < data.size(); ++i) {
      scaler.scale(loss_of(side.model, data[i]) / 2).backward();
      if (i % 2 == 0) continue;
      scaler.step(side.sgd);
      scaler.update();
      side.sgd.zero_grad();
    }
  };
  const auto control = [](Side& side, bool leave_out) {
    const auto data = batches_of_8();
    for (std::size_t i = 0; i < data.size(); ++i) {
      (loss_of(side.model, data[i]) / 2).backward();
      if (i % 2 == 0) continue;
      if (!(leave_out && i == spoiled + 1)) side.sgd.step();
      side.sgd.zero_grad();
    }
  };
  scaling_case(loop, control, 2, 0);
}

TEST_CASE("AmpScaler: two models, two optimizers, two losses; an overflow in one does not affect the other") {
  for (bool enabled : {true, false}) {
    const auto data = batches_of_8();
    const auto run = [&](ga::AmpScaler* scaler, bool leave_out) {
      Side one, two;
      for (auto& parameter : two.model->parameters()) parameter.data().mul_(0.5);
      for (std::size_t i = 0; i < data.size(); ++i) {
        one.sgd.zero_grad();
        two.sgd.zero_grad();
        auto a = one.model->forward(data[i].data), b = two.model->forward(data[i].data);
        auto first = torch::mse_loss(0.3 * a + 0.7 * b, data[i].target),
             second = torch::mse_loss(0.6 * a - 0.4 * b, data[i].target);
        if (!scaler) {
          first.backward({}, /*retain_graph=*/true);
          second.backward();
          if (!(leave_out && i == spoiled)) one.sgd.step();
          two.sgd.step();
          continue;
        }
        auto scaled = scaler->scale(std::vector<at::Tensor>{first, second});
        scaled[0].backward({}, /*retain_graph=*/true);
        scaled[1].backward();
        if (i == spoiled && enabled) one.overflow();
        scaler->unscale_(one.sgd);  // only one of them
        CHECK(scaler->step(one.sgd) == !(i == spoiled && enabled));
        CHECK(scaler->step(two.sgd));
        scaler->update();
      }
      return torch::cat({flat(one.model), flat(two.model)});
    };
    ga::AmpScaler scaler({.init_scale = 128, .growth_interval = 1, .enabled = enabled});
    const auto scaled = run(&scaler, false);
    CHECK(distance(scaled, run(nullptr, enabled)) < 1e-5);
    CHECK(distance(scaled, run(nullptr, !enabled)) > 1e-4);
    CHECK(scaler.get_scale() == (enabled ? 128 * 8 * 0.5 : 1));  // backed off once
  }
}

TEST_CASE("AmpScaler: several overflows before one update back off once") {
  for (int overflows : {1, 2, 3}) {
    std::vector<at::Tensor> weights;
    std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
    ga::AmpScaler scaler({.init_scale = 8});
    for (int i = 0; i < 3; ++i) {
      weights.push_back(torch::zeros({2}).set_requires_grad(true));
      optimizers.push_back(
          std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{weights[i]}, torch::optim::SGDOptions(1.0)));
      scaler.scale((weights[i] * (i < overflows ? inf : 1)).sum()).backward();
      CHECK(scaler.step(*optimizers[i]) == (i >= overflows));
    }
    scaler.update();
    CHECK(scaler.get_scale() == 4);
  }
}

TEST_CASE("AmpScaler: the scale equals that of PyTorch's kernel, bit for bit") {
  struct Setting {
    double init, growth, backoff;
    std::int64_t interval;
  };
  for (auto [init, growth, backoff, interval] : {Setting{65536, 2, 0.5, 3},
                                                 {1000, 1.7, 0.3, 2},
                                                 {4, 2, 0.25, 2},
                                                 {1e38, 3.3, 0.9, 1},
                                                 {0.1, 1.0001, 0.9999, 1}}) {
    One one;
    ga::AmpScaler scaler(
        {.init_scale = init, .growth_factor = growth, .backoff_factor = backoff, .growth_interval = interval});
    auto scale = torch::full({}, init, at::kFloat), tracker = torch::zeros({}, at::kInt);
    std::uint32_t random = 7;
    for (int i = 0; i < 300; ++i) {
      random = random * 1664525 + 1013904223;
      const bool overflow = (random >> 16) % 3 == 0;
      one.weight.mutable_grad() = torch::full({2}, overflow ? (i % 2 ? inf : not_a_number) : 0.0f);
      CHECK(scaler.step(one.sgd) == !overflow);
      scaler.update();
      at::_amp_update_scale_(scale, tracker, torch::full({}, float(overflow)), growth, backoff, interval);
      REQUIRE(scaler.get_scale() == scale.item<float>());
      REQUIRE(scaler.state_dict().at("_growth_tracker") == tracker.item<int>());
    }
  }
}

TEST_CASE("AmpScaler: grows after growth_interval updates without an overflow, but not beyond float32") {
  One one;
  for (double expected : {8, 16, 16, 32}) {
    one.backward();
    one.scaler.step(one.sgd);
    one.scaler.update();
    one.sgd.zero_grad();
    CHECK(one.scaler.get_scale() == expected);
  }
  one.scaler.update(3e38);
  one.scaler.set_growth_interval(1);
  for (int i = 0; i < 2; ++i) {
    one.weight.mutable_grad() = torch::zeros({2});
    one.scaler.step(one.sgd);
    one.scaler.update();
    CHECK(one.scaler.get_scale() == double(3e38f));
    CHECK(one.tracker() == 0);
  }
}

TEST_CASE("AmpScaler: inf and NaN are found in every dtype, layout, shape and position") {
  const auto parameters = [] {
    std::vector<at::Tensor> all{
        torch::ones({2}),    torch::ones({2, 3}), torch::ones({2}, at::kDouble),      torch::ones({3}, at::kBFloat16),
        torch::ones({4, 2}), torch::ones({}),     torch::ones({2}, at::kComplexFloat)};
    for (auto& parameter : all) parameter.set_requires_grad(true);
    return all;
  };
  const auto gradients = [] {
    return std::vector<at::Tensor>{
        torch::full({2}, 8.0),
        torch::full({3, 2}, 8.0).t(),  // transposed
        torch::full({2}, 8.0, at::kDouble),
        torch::full({6}, 8.0, at::kBFloat16).slice(0, 0, 6, 2),                                  // with gaps
        torch::sparse_coo_tensor(torch::tensor({{1, 3, 1}}), torch::full({3, 2}, 4.0), {4, 2}),  // with duplicates
        torch::full({}, 8.0),
        torch::full({2}, c10::complex<float>(8, 8), at::kComplexFloat)};
  };
  const auto spoil = [](const at::Tensor& gradient, float value) {
    auto numbers = gradient.is_sparse() ? gradient._values() : gradient;
    if (numbers.is_complex()) numbers = torch::view_as_real(numbers);
    numbers.select(-1, -1).fill_(value);
  };
  for (bool unscale : {false, true})
    for (int where = -1; where < 7; ++where)
      for (float value : {inf, -inf, not_a_number}) {
        INFO("in " << where << ", " << value << ", unscale " << unscale);
        auto all = parameters();
        torch::optim::SGD sgd(all, torch::optim::SGDOptions(1.0));
        ga::AmpScaler scaler({.init_scale = 8});
        auto grads = gradients();
        for (std::size_t i = 0; i < all.size(); ++i) {
          all[i].mutable_grad() = grads[i];
          if (int(i) == where && all[i].dim() > 0) spoil(all[i].grad(), value);
          if (int(i) == where && all[i].dim() == 0) all[i].mutable_grad().fill_(value);
        }
        if (unscale) scaler.unscale_(sgd);
        CHECK(scaler.step(sgd) == (where < 0));
        scaler.update();
        CHECK(scaler.get_scale() == (where < 0 ? 8 : 4));
        for (auto& parameter : all) {
          const auto dense = parameter.detach().clone();
          const bool touched = !dense.equal(torch::ones_like(dense));
          CHECK(touched == (where < 0));
        }
        if (where < 0) CHECK(all[1].equal(torch::zeros({2, 3})));  // 1 - 8 / 8
        if (where < 0) CHECK(all[4][1].equal(torch::zeros({2})));  // 1 - (4 + 4) / 8
      }
}

TEST_CASE("AmpScaler: duplicates in a sparse gradient whose sum overflows") {
  for (float part : {1e38f, 3e38f}) {
    auto weight = torch::zeros({4}).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1e-38));
    ga::AmpScaler scaler({.init_scale = 2});
    weight.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1, 1}}), torch::full({2}, part), {4});
    CHECK(scaler.step(sgd) == (part < 2e38f));
    CHECK((weight[1].item<float>() != 0) == (part < 2e38f));
  }
}

TEST_CASE("AmpScaler: a sparse embedding learns as without a scaler") {
  const auto run = [](bool scaled) {
    torch::manual_seed(1);
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(6, 3).sparse(true));
    torch::optim::SGD sgd(embedding->parameters(), torch::optim::SGDOptions(0.5));
    ga::AmpScaler scaler({.init_scale = 1024, .growth_interval = 1, .enabled = scaled});
    for (int i = 0; i < 5; ++i) {
      scaler.scale(embedding(torch::tensor({1, 2, 1, i})).square().mean()).backward();
      if (i % 2) scaler.unscale_(sgd);
      CHECK(scaler.step(sgd));
      scaler.update();
      sgd.zero_grad();
    }
    return embedding->weight.detach().clone();
  };
  CHECK(run(true).equal(run(false)));
}

TEST_CASE("AmpScaler: parameters in float64 and bfloat16") {
  for (auto dtype : {at::kDouble, at::kBFloat16}) {
    const auto run = [&](bool enabled) {
      auto model = make_model(dtype);
      torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
      ga::AmpScaler scaler({.enabled = enabled});
      for (auto& batch : make_batches({4, 4, 4}, dtype)) {
        scaler.scale(loss_of(model, batch)).backward();
        scaler.step(sgd);
        scaler.update();
        sgd.zero_grad();
      }
      return flat(model);
    };
    CHECK(run(true).equal(run(false)));  // the scale is a power of two
  }
}

TEST_CASE("AmpScaler: float16 parameters are refused before anything changes, by step and unscale_") {
  auto half = torch::zeros({3}, at::kHalf).set_requires_grad(true), wide = torch::zeros({2}).set_requires_grad(true);
  torch::optim::SGD sgd({wide, half}, torch::optim::SGDOptions(1.0));
  ga::AmpScaler scaler({.init_scale = 8});
  for (int i = 0; i < 2; ++i) {
    sgd.zero_grad();
    scaler.scale(wide.sum() + half.sum()).backward();
    REQUIRE_ERROR("AmpScaler: parameters and gradients must not be float16, got parameter 1 (shape [3]); keep",
                  scaler.step(sgd));
    REQUIRE_ERROR("keep parameters in float32 and run forward inside an Autocast", scaler.unscale_(sgd));
    CHECK(wide.grad()[0].item<float>() == 8);
    CHECK(wide[0].item<float>() == 0);
  }
  ga::GradAccumulator accumulator(sgd, {.steps = 2, .accumulate_in = at::kFloat});
  REQUIRE_ERROR("must not be float16", scaler.step(accumulator));
  CHECK(accumulator.micro_steps() == 0);
  half.set_requires_grad(false);  // a frozen parameter is never stepped
  half.mutable_grad().reset();
  CHECK(scaler.step(sgd));
  ga::AmpScaler disabled({.enabled = false});
  half.set_requires_grad(true).sum().backward();
  CHECK(disabled.step(sgd));
}

TEST_CASE("AmpScaler: unscale_ divides gradients by the scale immediately and only once") {
  One one;
  one.backward(2);
  CHECK(one.weight.grad()[0].item<float>() == 16);
  one.scaler.unscale_(one.sgd);
  CHECK(one.weight.grad()[0].item<float>() == 2);
  REQUIRE_ERROR("AmpScaler: unscale_() has already been called on this optimizer since the last update()",
                one.scaler.unscale_(one.sgd));
  CHECK(one.weight.grad()[0].item<float>() == 2);
  CHECK(one.scaler.step(one.sgd));
  CHECK(one.value() == -2);
  REQUIRE_ERROR("AmpScaler: unscale_() was called after step(); call update() first", one.scaler.unscale_(one.sgd));
  REQUIRE_ERROR("AmpScaler: step() has already been called on this optimizer since the last update()",
                one.scaler.step(one.sgd));
  CHECK(one.value() == -2);
  one.scaler.update();
  CHECK(one.tracker() == 1);
  one.sgd.zero_grad();
  one.backward(2);
  CHECK(one.scaler.step(one.sgd));
  CHECK(one.value() == -4);
}

TEST_CASE("AmpScaler: the result of unscale_ stands, also if gradients change after it") {
  for (bool overflow : {false, true}) {
    One one;
    one.backward(overflow ? inf : 2);
    one.scaler.unscale_(one.sgd);
    fill_gradient(one.weight, overflow ? 1 : inf);
    CHECK(one.scaler.step(one.sgd) == !overflow);
    CHECK(std::isinf(one.value()) == !overflow);  // as written by the user
    one.scaler.update();
    CHECK(one.scaler.get_scale() == (overflow ? 4 : 8));
  }
}

TEST_CASE("AmpScaler: without unscale_ the gradients at the time of step count") {
  One one;
  one.backward(2);
  fill_gradient(one.weight, not_a_number);
  CHECK_FALSE(one.scaler.step(one.sgd));
  CHECK(one.value() == 0);
}

TEST_CASE("AmpScaler: unscale_ without step is enough for update") {
  for (bool overflow : {false, true}) {
    One one;
    one.backward(overflow ? not_a_number : 2);
    one.scaler.unscale_(one.sgd);
    one.sgd.zero_grad();
    one.scaler.update();
    CHECK(one.scaler.get_scale() == (overflow ? 4 : 8));
    CHECK(one.tracker() == !overflow);
    one.backward(2);
    CHECK(one.scaler.step(one.sgd));
    CHECK(one.value() == -2);
  }
}

TEST_CASE("AmpScaler: update with nothing recorded does nothing") {
  One one;
  one.scaler.update();
  one.backward();
  one.scaler.update();
  CHECK(one.scaler.get_scale() == 8);
  CHECK(one.tracker() == 0);
  CHECK(one.scaler.step(one.sgd));
  one.scaler.update();
  one.scaler.update();
  CHECK(one.tracker() == 1);
}

TEST_CASE("AmpScaler: without gradients nothing is updated, and the scale does not grow") {
  One one;
  torch::optim::SGD empty(std::vector<at::Tensor>{}, torch::optim::SGDOptions(1.0));
  const c10::WarningUtils::WarnAlways each_time;
  for (auto* sgd : {&one.sgd, &empty})
    for (bool unscale : {false, true}) {
      const Warnings warnings;
      if (unscale) one.scaler.unscale_(*sgd);
      CHECK_FALSE(one.scaler.step(*sgd));
      REQUIRE(warnings.texts().size() == 1);
      CHECK(contains(warnings.texts()[0], "AmpScaler: step() found no gradient in the optimizer's parameters"));
      one.scaler.update();
      if (unscale) one.scaler.unscale_(*sgd);
      one.scaler.update();
      CHECK(one.scaler.get_scale() == 8);
      CHECK(one.tracker() == 0);
    }
}

TEST_CASE("AmpScaler: update(new_scale)") {
  One one;
  one.backward(inf);
  one.scaler.step(one.sgd);
  one.scaler.update(1000);
  CHECK(one.scaler.get_scale() == 1000);
  one.scaler.update();
  CHECK(one.scaler.get_scale() == 1000);  // results with the old scale are dropped
  one.sgd.zero_grad();
  one.backward(2);
  CHECK(one.weight.grad()[0].item<float>() == 2000);
  CHECK(one.scaler.step(one.sgd));
  CHECK(one.value() == -2);
  one.scaler.update();
  for (double wrong : {0.0, -1.0, double(inf), double(not_a_number), 1e39, 1e-60})
    REQUIRE_ERROR("AmpScaler: new_scale must be > 0 and finite in float32, got", one.scaler.update(wrong));
  CHECK(one.scaler.get_scale() == 1000);
}

TEST_CASE("AmpScaler: scales tensors of any shape and dtype, a single float16 number in float32") {
  ga::AmpScaler scaler({.init_scale = 65536});
  const auto half = torch::full({}, 2.0, at::kHalf);
  CHECK(scaler.scale(half).scalar_type() == at::kFloat);
  CHECK(scaler.scale(half).item<float>() == 131072);
  CHECK(std::isinf((half * 65536).item<float>()));  // control: by a number it overflows
  CHECK(scaler.scale(torch::ones({2, 3})).equal(torch::full({2, 3}, 65536.0)));
  CHECK(scaler.scale(torch::ones({2}, at::kDouble)).scalar_type() == at::kDouble);
  const auto two = scaler.scale(std::vector<at::Tensor>{torch::ones({}), torch::ones({1}, at::kDouble)});
  CHECK(two.size() == 2);
  CHECK(two[1].item<double>() == 65536);
  CHECK(scaler.scale(std::vector<at::Tensor>{}).empty());
  REQUIRE_ERROR("AmpScaler: the loss must be defined", scaler.scale(at::Tensor()));
  scaler.update(2);
  CHECK(scaler.scale(torch::ones({})).item<float>() == 2);
}

TEST_CASE("AmpScaler: a scaled loss is valid after a change of the scale, and after a first call without gradients") {
  One one;
  {
    c10::InferenceMode inference;
    CHECK(one.scaler.scale(torch::ones({})).item<float>() == 8);
  }
  const auto loss = one.scaler.scale((one.weight * 2).sum());
  one.scaler.update(4);
  CHECK(one.scaler.scale(torch::ones({})).item<float>() == 4);
  loss.backward();
  CHECK(one.weight.grad()[0].item<float>() == 16);
}

TEST_CASE("AmpScaler: a weighted loss keeps its value; its seed is scaled") {
  for (auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    auto weight = torch::ones({2}, at::kFloat).set_requires_grad(true);
    ga::AmpScaler scaler({.init_scale = 1024});
    const auto loss = scaler.scale(ga::Loss{(weight.to(dtype) * 3).sum(), 5});
    CHECK(loss.mean.item<double>() == 6);
    CHECK(loss.items == 5);
    loss.backward();
    CHECK(weight.grad()[0].item<float>() == 3072);
  }
  ga::AmpScaler scaler({.init_scale = 131072});  // beyond float16: an overflow, as in Python
  auto weight = torch::ones({2}).set_requires_grad(true);
  scaler.scale(ga::Loss{weight.to(at::kHalf).sum()}).backward();
  CHECK(std::isinf(weight.grad()[0].item<float>()));
  ga::AmpScaler disabled({.enabled = false});
  CHECK(disabled.scale(ga::Loss{weight.sum()}).mean.item<float>() == 2);
}

TEST_CASE("AmpScaler: a disabled scaler only steps") {
  One one;
  ga::AmpScaler scaler({.init_scale = 8, .enabled = false});
  CHECK_FALSE(scaler.is_enabled());
  CHECK(one.scaler.is_enabled());
  const auto loss = (one.weight * 2).sum();
  CHECK(scaler.scale(loss).is_same(loss));
  CHECK(scaler.scale(std::vector<at::Tensor>{loss})[0].is_same(loss));
  loss.backward();
  scaler.unscale_(one.sgd);
  scaler.unscale_(one.sgd);
  CHECK(scaler.step(one.sgd));
  CHECK(scaler.step(one.sgd));
  CHECK(one.value() == -4);
  scaler.update();
  scaler.update(3.0);
  CHECK(scaler.get_scale() == 1);
  CHECK(scaler.state_dict().empty());
  scaler.load_state_dict({});
  fill_gradient(one.weight, inf);
  CHECK(scaler.step(one.sgd));  // overflows are not checked
  CHECK(std::isinf(one.value()));
  ga::GradAccumulator accumulator(one.sgd, {.steps = 2});
  fill_gradient(one.weight, 1);
  CHECK_FALSE(scaler.step(accumulator));
  CHECK(scaler.step(accumulator));
}

TEST_CASE("AmpScaler: options and setters out of range") {
  const auto with = [](auto change) {
    ga::AmpScalerOptions options;
    change(options);
    return error_of([&] { ga::AmpScaler scaler(options); });
  };
  for (double wrong : {1.0, 0.5, -2.0, double(inf), double(not_a_number)}) {
    CHECK(contains(with([&](auto& o) { o.growth_factor = wrong; }),
                   "AmpScaler: growth_factor must be > 1 and finite, got " + c10::str(wrong)));
    ga::AmpScaler scaler;
    REQUIRE_ERROR("AmpScaler: growth_factor must be > 1", scaler.set_growth_factor(wrong));
    CHECK(scaler.get_growth_factor() == 2);
  }
  for (double wrong : {1.0, 0.0, -0.5, 2.0, double(not_a_number)}) {
    CHECK(contains(with([&](auto& o) { o.backoff_factor = wrong; }),
                   "AmpScaler: backoff_factor must be > 0 and < 1, got " + c10::str(wrong)));
    ga::AmpScaler scaler;
    REQUIRE_ERROR("AmpScaler: backoff_factor must be", scaler.set_backoff_factor(wrong));
    CHECK(scaler.get_backoff_factor() == 0.5);
  }
  for (std::int64_t wrong : {0, -1}) {
    CHECK(contains(with([&](auto& o) { o.growth_interval = wrong; }),
                   "AmpScaler: growth_interval must be >= 1, got " + std::to_string(wrong)));
    ga::AmpScaler scaler;
    REQUIRE_ERROR("AmpScaler: growth_interval must be >= 1", scaler.set_growth_interval(wrong));
    CHECK(scaler.get_growth_interval() == 2000);
  }
  for (double wrong : {0.0, -1.0, double(inf), double(not_a_number), 1e39})
    CHECK(contains(with([&](auto& o) { o.init_scale = wrong; }),
                   "AmpScaler: init_scale must be > 0 and finite in float32, got " + c10::str(wrong)));
  for (double wrong : {-1.0, double(inf), double(not_a_number)})
    CHECK(contains(with([&](auto& o) { o.min_scale = wrong; }), "AmpScaler: min_scale must be >= 0 and finite, got"));
  CHECK(contains(with([&](auto& o) { o.min_scale = 1e6; }),
                 "AmpScaler: init_scale must be >= min_scale (1e+06), got 65536"));
  ga::AmpScaler scaler;
  scaler.set_growth_factor(3);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(7);
  CHECK(scaler.get_growth_factor() == 3);
  CHECK(scaler.get_backoff_factor() == 0.25);
  CHECK(scaler.get_growth_interval() == 7);
  CHECK(scaler.get_scale() == 65536);
}

TEST_CASE("AmpScaler: min_scale ends endless backing off with an error") {
  One one;
  ga::AmpScaler scaler({.init_scale = 4, .min_scale = 2});
  const auto overflow = [&] {
    fill_gradient(one.weight, not_a_number);
    scaler.step(one.sgd);
  };
  one.backward();
  overflow();
  scaler.update();
  CHECK(scaler.get_scale() == 2);
  overflow();
  for (int i = 0; i < 2; ++i)
    REQUIRE_ERROR(
        "AmpScaler: the scale must stay >= min_scale (2), but overflows reduced it to 1: gradients overflow at every "
        "scale; check the data and the loss for inf or NaN",
        scaler.update());
  CHECK(scaler.get_scale() == 2);
  REQUIRE_ERROR("has already been called", scaler.step(one.sgd));
  REQUIRE_ERROR("new_scale must be >= min_scale (2), got 1", scaler.update(1.0));
  scaler.update(64);
  CHECK(scaler.get_scale() == 64);
  // Without min_scale, the error comes when the scale would be 0.
  ga::AmpScaler tiny({.init_scale = 1e-44});
  for (int i = 0; i < 2; ++i) {
    fill_gradient(one.weight, not_a_number);
    tiny.step(one.sgd);
    tiny.update();
  }
  tiny.step(one.sgd);
  tiny.update();
  tiny.step(one.sgd);
  REQUIRE_ERROR("AmpScaler: the scale must stay > 0", tiny.update());
}

TEST_CASE("AmpScaler: state_dict has Python's entries, load_state_dict accepts them before and after the first use") {
  for (bool used : {false, true}) {
    One one;
    ga::AmpScaler from({.init_scale = 3, .growth_factor = 4, .backoff_factor = 0.5, .growth_interval = 2}),
        to({.init_scale = 6, .growth_factor = 7, .backoff_factor = 0.8, .growth_interval = 1});
    if (used) {
      (void)to.scale(torch::ones({}));
      one.weight.mutable_grad() = torch::zeros({2});
      from.step(one.sgd);
      from.update();
    }
    const auto state = from.state_dict();
    CHECK(state == std::map<std::string, double>{{"scale", 3},
                                                 {"growth_factor", 4},
                                                 {"backoff_factor", 0.5},
                                                 {"growth_interval", 2},
                                                 {"_growth_tracker", used}});
    to.load_state_dict(state);
    CHECK(to.state_dict() == state);
    CHECK(to.get_scale() == 3);
    CHECK(to.scale(torch::ones({})).item<float>() == 3);
    one.weight.mutable_grad() = torch::zeros({2});
    for (auto* scaler : {&from, &to}) {
      scaler->step(one.sgd);
      scaler->update();
    }
    CHECK(to.get_scale() == (used ? 12 : 3));
    CHECK(to.state_dict() == from.state_dict());
  }
}

TEST_CASE("AmpScaler: an invalid state changes nothing") {
  ga::AmpScaler scaler({.init_scale = 4, .min_scale = 0.5});
  const auto good = scaler.state_dict();
  REQUIRE_ERROR("AmpScaler: the state must not be empty; it was saved by a scaler that was disabled",
                scaler.load_state_dict({}));
  for (auto& [key, value] : good) {
    auto missing = good;
    missing.erase(key);
    REQUIRE_ERROR("AmpScaler: the state must have the entry '" + key + "', but does not",
                  scaler.load_state_dict(missing));
    for (double wrong : {-1.0, double(not_a_number), double(inf), 1e300}) {
      auto bad = good;
      for (auto& [other, number] : bad) number = other == "scale" ? 8 : number;
      bad[key] = wrong;
      if (key == "growth_factor" && wrong == 1e300) continue;  // unusual, but valid
      INFO(key << " = " << wrong);
      REQUIRE_ERROR("AmpScaler: " + key + " must be", scaler.load_state_dict(bad));
    }
  }
  auto fraction = good;
  fraction["growth_interval"] = 2.5;
  REQUIRE_ERROR("AmpScaler: growth_interval must be a whole number >= 0, got 2.5", scaler.load_state_dict(fraction));
  auto low = good;
  low["scale"] = 0.25;
  REQUIRE_ERROR("AmpScaler: scale must be >= min_scale (0.5), got 0.25", scaler.load_state_dict(low));
  CHECK(scaler.state_dict() == good);
}

TEST_CASE("AmpScaler: saved and loaded at every step, training is bitwise the same") {
  const auto run = [](bool reload) {
    Side side;
    auto scaler = std::make_unique<ga::AmpScaler>(
        ga::AmpScalerOptions{.init_scale = 1000, .growth_factor = 1.7, .growth_interval = 2});
    int i = 0;
    for (auto& batch : batches_of_8()) {
      scaler->scale(loss_of(side.model, batch)).backward();
      if (i++ == 1) side.overflow();
      scaler->step(side.sgd);
      scaler->update();
      side.sgd.zero_grad();
      if (!reload) continue;
      const auto state = scaler->state_dict();
      scaler = std::make_unique<ga::AmpScaler>();
      scaler->load_state_dict(state);
    }
    return torch::cat({flat(side.model), torch::full({1}, scaler->get_scale())});
  };
  CHECK(run(true).equal(run(false)));
}

TEST_CASE("AmpScaler: a growth interval set below the count is due at the next update") {
  One one;
  one.scaler.set_growth_interval(10);
  for (int i = 0; i < 6; ++i) {
    if (i == 5) one.scaler.set_growth_interval(3);
    one.weight.mutable_grad() = torch::zeros({2});
    one.scaler.step(one.sgd);
    one.scaler.update();
  }
  CHECK(one.scaler.get_scale() == 16);
}

TEST_CASE("AmpScaler: with autocast, float16 gradients do not vanish") {
  const auto run = [](bool scaled, bool autocast) {
    auto weight = torch::full({4, 4}, 0.5).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1e6));
    ga::AmpScaler scaler({.enabled = scaled});
    const auto loss = [&] {
      ga::Autocast scope(at::kCPU, at::kHalf, autocast);
      return torch::ones({4, 4}).mm(weight).to(at::kFloat).mul(1e-9).sum();
    }();
    scaler.scale(loss).backward();
    CHECK(scaler.step(sgd));
    return weight.detach().clone();
  };
  CHECK(distance(run(true, true), run(false, false)) < 1e-4);
  CHECK(run(false, true).equal(torch::full({4, 4}, 0.5)));  // control: without a scaler they vanish
}

TEST_CASE("AmpScaler: with autocast, training matches float32 to float16's precision") {
  const auto run = [](bool amp) {
    Side side;
    side.sgd.param_groups()[0].options().set_lr(0.1);
    ga::AmpScaler scaler({.init_scale = 128, .growth_interval = 1, .enabled = amp});
    for (auto& batch : batches_of_8()) {
      const auto loss = [&] {
        ga::Autocast scope(at::kCPU, at::kHalf, amp);
        return loss_of(side.model, batch);
      }();
      scaler.scale(loss).backward();
      CHECK(scaler.step(side.sgd));
      scaler.update();
      side.sgd.zero_grad();
    }
    return flat(side.model);
  };
  CHECK(distance(run(true), run(false)) < 2e-3);
  CHECK(distance(run(true), run(false)) > 1e-7);  // control
}

TEST_CASE("AmpScaler: every optimizer of LibTorch, also by reference to its base") {
  const auto compare = [](auto make) {
    const auto run = [&](bool scaled) {
      auto model = make_model(at::kFloat);
      auto optimizer = make(model->parameters());
      torch::optim::Optimizer& reference = *optimizer;
      ga::AmpScaler scaler({.growth_interval = 2, .enabled = scaled});
      int i = 0;
      for (auto& batch : make_batches({4, 4, 4, 4, 4}, at::kFloat)) {
        scaler.scale(loss_of(model, batch)).backward();
        if (i % 2) scaler.unscale_(reference);
        CHECK((i++ % 3 ? scaler.step(reference) : scaler.step(*optimizer)));
        if (scaled) REQUIRE_ERROR("has already been called", scaler.step(reference));
        scaler.update();
        optimizer->zero_grad();
      }
      return flat(model);
    };
    CHECK(run(true).equal(run(false)));
  };
  using namespace torch::optim;
  using Parameters = std::vector<at::Tensor>;
  compare([](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).nesterov(true)); });
  compare([](Parameters p) { return std::make_unique<Adam>(p, AdamOptions(0.01).amsgrad(true)); });
  compare([](Parameters p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01)); });
  compare([](Parameters p) { return std::make_unique<RMSprop>(p, RMSpropOptions(0.01)); });
  compare([](Parameters p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.01)); });
}

TEST_CASE("AmpScaler: an overflow does not change the optimizer's state") {
  auto model = make_model(at::kFloat);
  torch::optim::AdamW adam(model->parameters(), torch::optim::AdamWOptions(0.1));
  ga::AmpScaler scaler;
  const auto data = make_batches({4}, at::kFloat);
  scaler.scale(loss_of(model, data[0])).backward();
  fill_gradient(model->parameters()[1], inf);
  const auto before = flat(model);
  CHECK_FALSE(scaler.step(adam));
  CHECK(adam.state().empty());
  CHECK(flat(model).equal(before));
}

namespace {

// An optimizer without virtual functions or a base class.
struct UserMade {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  int steps = 0;
  explicit UserMade(std::vector<at::Tensor> parameters) { groups.emplace_back(std::move(parameters)); }
  auto& param_groups() { return groups; }
  void zero_grad() {
    for (auto& p : groups[0].params()) p.mutable_grad().reset();
  }
  void step() {
    ++steps;
    at::NoGradGuard no_grad;
    for (auto& p : groups[0].params()) p.sub_(p.grad());
  }
};

// An optimizer that takes the factor, whose first base class is not LibTorch's. Wrongly changes gradients.
struct Taking : ga::TakesGradients, torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override { return SGD::step(closure); }
  void step(ga::Gradients gradients) override {
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < gradients.raw().size(); ++i) {
      gradients.parameters()[i].sub_(gradients.raw()[i] * gradients.multiplier(at::kCPU));
      gradients.raw()[i].fill_(inf);
    }
  }
};

}  // namespace

TEST_CASE("AmpScaler: a user-made optimizer") {
  auto weight = torch::zeros({2}).set_requires_grad(true);
  UserMade optimizer({weight});
  ga::AmpScaler scaler({.init_scale = 8});
  for (double slope : {2.0, double(inf), 3.0}) {
    scaler.scale((weight * slope).sum()).backward();
    CHECK(scaler.step(optimizer) == std::isfinite(slope));
    REQUIRE_ERROR("has already been called", scaler.step(optimizer));
    scaler.update();
    optimizer.zero_grad();
  }
  CHECK(weight[0].item<float>() == -5);
  CHECK(optimizer.steps == 2);
  CHECK(scaler.get_scale() == 4);
}

TEST_CASE("AmpScaler: an optimizer that takes the factor, through any of its base classes") {
  auto weight = torch::zeros({2}).set_requires_grad(true);
  Taking optimizer({weight}, torch::optim::SGDOptions(1.0));
  torch::optim::Optimizer& reference = optimizer;
  ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
  scaler.scale((weight * 2).sum()).backward();
  CHECK(scaler.step(reference));
  REQUIRE_ERROR("has already been called", scaler.step(optimizer));
  CHECK(weight[0].item<float>() == -2);
  scaler.update();
  CHECK(scaler.get_scale() == 16);  // it was finite when it was checked
  optimizer.zero_grad();
  scaler.scale((weight * 2).sum()).backward();
  scaler.unscale_(optimizer);
  REQUIRE_ERROR("has already been called", scaler.unscale_(reference));
  CHECK(scaler.step(reference));
  CHECK(weight[0].item<float>() == -4);
}

TEST_CASE("AmpScaler: after an exception in the optimizer no gradient is divided twice") {
  auto weight = torch::zeros({2}).set_requires_grad(true);
  Breaks optimizer({weight}, torch::optim::SGDOptions(1.0));
  ga::AmpScaler scaler({.init_scale = 8});
  scaler.scale((weight * 2).sum()).backward();
  REQUIRE_ERROR("step broke", scaler.step(optimizer));
  REQUIRE_ERROR("has already been called", scaler.step(optimizer));
  scaler.update();
  optimizer.zero_grad();
  optimizer.breaks = false;
  scaler.scale((weight * 2).sum()).backward();
  CHECK(scaler.step(optimizer));
  CHECK(weight[0].item<float>() == -2);
}

TEST_CASE("AmpScaler: LBFGS and an accumulator behind a reference") {
  auto model = make_model();
  torch::optim::LBFGS lbfgs(model->parameters());
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  ga::GradAccumulator accumulator(sgd, {.steps = 2});
  torch::optim::Optimizer &hidden_lbfgs = lbfgs, &hidden_accumulator = accumulator;
  for (bool enabled : {true, false}) {
    ga::AmpScaler scaler({.enabled = enabled});
    REQUIRE_ERROR("AmpScaler: must not be given LBFGS", scaler.step(hidden_lbfgs));
    REQUIRE_ERROR("AmpScaler: must not be given LBFGS", scaler.unscale_(hidden_lbfgs));
    REQUIRE_ERROR("AmpScaler: an accumulator must not be passed as a torch::optim::Optimizer&",
                  scaler.step(hidden_accumulator));
    REQUIRE_ERROR("pass the accumulator itself", scaler.unscale_(hidden_accumulator));
  }
}

TEST_CASE("AmpScaler: on a device, and on several", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto run = [](bool scaled, bool overflow) {
    auto first = torch::zeros({4}).set_requires_grad(true),
         second = torch::zeros({4}, at::Device(at::kCUDA, 0)).set_requires_grad(true),
         third = torch::zeros({4}, at::TensorOptions(at::kBFloat16).device(at::kCUDA)).set_requires_grad(true);
    torch::optim::SGD sgd({first, second, third}, torch::optim::SGDOptions(1.0));
    ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1, .enabled = scaled});
    const auto last = at::Device(at::kCUDA, torch::cuda::device_count() - 1);
    const auto loss = (first.to(last) * 2).sum() + (second.to(last) * 3).sum() + (third.to(last) * 4).sum();
    scaler.scale(loss).backward();
    if (overflow) fill_gradient(third, inf);
    CHECK(scaler.step(sgd) == !overflow);
    scaler.update();
    if (scaled) CHECK(scaler.get_scale() == (overflow ? 4 : 16));
    return torch::cat({first.detach(), second.detach().cpu(), third.detach().cpu().to(at::kFloat)});
  };
  CHECK(run(true, false).equal(run(false, false)));
  CHECK(run(true, true).equal(torch::zeros({12})));
}

TEST_CASE("AmpScaler: autocast on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto run = [](bool amp) {
    Side side;
    side.model->to(at::kCUDA);
    side.sgd.param_groups()[0].options().set_lr(0.1);
    ga::AmpScaler scaler({.init_scale = 128, .growth_interval = 1, .enabled = amp});
    for (auto& batch : batches_of_8()) {
      const auto loss = [&] {
        ga::Autocast scope(at::kCUDA, at::kHalf, amp);
        return torch::mse_loss(side.model->forward(batch.data.cuda()), batch.target.cuda());
      }();
      scaler.scale(loss).backward();
      CHECK(scaler.step(side.sgd));
      scaler.update();
      side.sgd.zero_grad();
    }
    return flat(side.model).cpu();
  };
  CHECK(distance(run(true), run(false)) < 2e-3);
}
