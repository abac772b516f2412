// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>

#include "support/breaks.hpp"
#include "support/models.hpp"

#include <limits>
#include <memory>
#include <optional>
#include <vector>

// A scaler and accumulators: the scale does not change while a window is open, and each window is divided exactly once.

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

// A parameter whose gradient is the slope of its loss, and an accumulator. A window of slopes 2 and 4 moves it to -3.
struct One {
  at::Tensor weight = torch::zeros({2}).set_requires_grad(true);
  torch::optim::SGD sgd{{weight}, torch::optim::SGDOptions(1.0)};
  ga::GradAccumulator<torch::optim::SGD> optimizer;

  explicit One(std::int64_t steps = 2) : optimizer(sgd, {.steps = steps}) {}
  at::Tensor loss(double slope) const { return (weight * slope).sum(); }
  double value() const { return weight[0].item<double>(); }
  double gradient() const { return weight.grad().defined() ? weight.grad()[0].item<double>() : 0; }
  // Runs a micro-batch as a loop does.
  bool micro_batch(ga::AmpScaler& scaler, double slope) {
    scaler.scale(loss(slope)).backward();
    const bool moved = scaler.step(optimizer);
    optimizer.zero_grad();
    return moved;
  }
};

double tracker(const ga::AmpScaler& scaler) { return scaler.state_dict().at("_growth_tracker"); }

// Trains in windows of 4, the last one shorter: with or without scaler, weights and clipping.
enum class Clip { none, of_the_accumulator, after_unscale };
template <class AdamW = torch::optim::AdamW>
at::Tensor train(bool scaled, bool weighted, Clip clip, double init_scale = 1024, bool update_always = true) {
  auto model = make_model(at::kFloat);
  AdamW adam(model->parameters(), torch::optim::AdamWOptions(0.01));
  ga::GradAccumulator optimizer(adam, {.steps = 4});
  ga::AmpScaler scaler({.init_scale = init_scale, .growth_interval = 1, .enabled = scaled});
  const auto zero = [&] { optimizer.zero_grad(); };
  for (auto& batch : make_batches({3, 5, 2, 6, 1, 4, 4, 7, 2, 5}, at::kFloat)) {
    if (weighted)
      optimizer.backward(scaler.scale(ga::Loss{loss_of(model, batch), batch.data.size(0)}));
    else
      scaler.scale(loss_of(model, batch)).backward();
    if (clip == Clip::of_the_accumulator) optimizer.clip_grad_norm_(0.1);
    if (optimizer.ready() && clip == Clip::after_unscale) {
      scaler.unscale_(optimizer);
      if (!scaled) optimizer.gradients().apply();
      ga::clip_grad_norm_(model->parameters(), 0.1);
    }
    const bool closes = optimizer.ready();
    CHECK(scaler.step(optimizer) == closes);
    if (closes || update_always) scaler.update();
    zero();
  }
  if (clip == Clip::after_unscale) optimizer.clip_grad_norm_(0.1);  // of the last, shorter window
  CHECK(optimizer.flush());
  scaler.update();
  if (scaled) CHECK(scaler.get_scale() == double(float(init_scale)) * 8);  // it grew with every window
  return flat(model);
}

}  // namespace

TEST_CASE("AmpScaler, windows: scaled training equals unscaled training, the shorter last window included") {
  for (bool weighted : {false, true})
    for (auto clip : {Clip::none, Clip::of_the_accumulator, Clip::after_unscale}) {
      INFO("weighted " << weighted << ", clip " << int(clip));
      const auto plain = train(false, weighted, clip);
      const double tolerance = clip == Clip::none ? 0 : 1e-6;  // the norm is rounded
      CHECK(distance(train(true, weighted, clip), plain) <= tolerance);
      CHECK(distance(train(true, weighted, clip, 1024, /*update_always=*/false), plain) <= tolerance);
      CHECK(distance(train(true, weighted, clip, 1000), plain) < 1e-5);
    }
  // Controls: weights and clipping had an effect.
  CHECK(distance(train(true, true, Clip::none), train(true, false, Clip::none)) > 1e-4);
  CHECK(distance(train(true, true, Clip::of_the_accumulator), train(true, true, Clip::none)) > 1e-7);
}

TEST_CASE("AmpScaler, windows: an optimizer that takes the scale, the mean and the clipping in its own pass") {
  using AdamW = ga::optim::AdamW;
  for (bool weighted : {false, true})
    for (auto clip : {Clip::none, Clip::of_the_accumulator, Clip::after_unscale}) {
      INFO("weighted " << weighted << ", clip " << int(clip));
      const auto plain = train<AdamW>(false, weighted, clip);
      CHECK(distance(train<AdamW>(true, weighted, clip), plain) <= (clip == Clip::none ? 0 : 1e-6));
      CHECK(distance(train<AdamW>(true, weighted, clip, 1000), plain) < 1e-5);
      CHECK(distance(train(true, weighted, clip), plain) < 1e-4);
    }
  auto model = make_model(at::kFloat);
  AdamW adam(model->parameters(), torch::optim::AdamWOptions(0.1));
  ga::AmpScaler scaler({.init_scale = 8});
  const auto before = flat(model);
  scaler.scale(loss_of(model, make_batches({4}, at::kFloat)[0]) * inf).backward();
  CHECK_FALSE(scaler.step(adam));
  scaler.update();
  CHECK(scaler.get_scale() == 4);
  CHECK(flat(model).equal(before));
  CHECK(adam.state().empty());
}

TEST_CASE("AmpScaler, windows: inside a window step counts micro-batches, and update does nothing") {
  One one(3);
  ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
  for (int i = 0; i < 2; ++i) {
    CHECK_FALSE(one.micro_batch(scaler, 1 + i));
    CHECK(one.optimizer.micro_steps() == i + 1);
    for (int j = 0; j < i; ++j) scaler.update();  // calling update is optional
    CHECK(scaler.get_scale() == 8);
    CHECK(one.gradient() == (i == 0 ? 8 : 24));
  }
  CHECK(one.micro_batch(scaler, 3));
  CHECK(one.value() == -2);
  REQUIRE_ERROR("AmpScaler: step() has already been called on this optimizer since the last update()",
                one.micro_batch(scaler, 1));
  CHECK(scaler.get_scale() == 8);
  scaler.update();
  CHECK(scaler.get_scale() == 16);
}

TEST_CASE("AmpScaler, windows: an overflow in any micro-batch discards the window, and backs off once") {
  for (int where = 0; where < 3; ++where)
    for (bool flush : {false, true})
      for (bool weighted : {false, true}) {
        INFO("in " << where << ", flush " << flush);
        One one(flush ? 5 : 3);
        ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
        for (int i = 0; i < 3; ++i) {
          auto loss = one.loss(i == where ? inf : 1);
          weighted ? one.optimizer.backward(scaler.scale(ga::Loss{loss, 2})) : scaler.scale(loss).backward();
          CHECK_FALSE(scaler.step(one.optimizer));
          if (i < 2) scaler.update();
          if (i < 2) CHECK(scaler.get_scale() == 8);
          if (i < 2) one.optimizer.zero_grad();
        }
        if (flush) CHECK_FALSE(one.optimizer.flush());
        scaler.update();
        scaler.update();
        CHECK(scaler.get_scale() == 4);
        CHECK(one.value() == 0);
        CHECK(one.optimizer.micro_steps() == 0);
        CHECK_FALSE(one.weight.grad().defined());
        CHECK(one.optimizer.updates() == 0);
        one.optimizer.set_steps(1);
        CHECK(one.micro_batch(scaler, 2));
        CHECK(one.value() == -2);
      }
}

TEST_CASE("AmpScaler, windows: the result of unscale_ stands") {
  for (bool overflow : {false, true}) {
    One one;
    ga::AmpScaler scaler({.init_scale = 8});
    one.micro_batch(scaler, overflow ? inf : 2);
    scaler.scale(one.loss(4)).backward();
    scaler.unscale_(one.optimizer);
    CHECK(one.gradient() == (overflow ? inf : 3));  // the mean included
    {
      at::NoGradGuard no_grad;
      one.weight.mutable_grad().fill_(overflow ? 5 : inf);
    }
    CHECK(scaler.step(one.optimizer) == !overflow);
    CHECK(one.value() == (overflow ? 0 : -inf));
    scaler.update();
    CHECK(scaler.get_scale() == (overflow ? 4 : 8));
  }
}

TEST_CASE("AmpScaler, windows: unscale_ inside a window is an error that says where to call it") {
  One one;
  ga::AmpScaler scaler({.init_scale = 8});
  scaler.scale(one.loss(2)).backward();
  REQUIRE_ERROR("put it inside `if (optimizer.ready())`, after backward", scaler.unscale_(one.optimizer));
  CHECK(one.gradient() == 16);
  scaler.step(one.optimizer);
  REQUIRE_ERROR("inside `if (optimizer.ready())`", scaler.unscale_(one.optimizer));  // ready; the backward is missing
  scaler.scale(one.loss(4)).backward();
  scaler.unscale_(one.optimizer);
  CHECK(one.gradient() == 3);
  REQUIRE_ERROR("unscale_() has already been called", scaler.unscale_(one.optimizer));
  CHECK(scaler.step(one.optimizer));
  REQUIRE_ERROR("unscale_() was called after step(); call update() first", scaler.unscale_(one.optimizer));
  CHECK(one.value() == -3);
}

TEST_CASE("AmpScaler, windows: gradients that the user applied before the scaler saw the window") {
  One one(1);
  ga::AmpScaler scaler({.init_scale = 8});
  scaler.scale(one.loss(2)).backward();
  one.optimizer.gradients().apply();
  CHECK(scaler.step(one.optimizer));
  CHECK(one.value() == -2);
}

TEST_CASE("AmpScaler, windows: a flush counts at update, or when the next window begins, but only once") {
  for (bool overflow : {false, true})
    for (bool update : {false, true}) {
      One one(4);
      ga::AmpScaler scaler({.init_scale = 8});
      one.micro_batch(scaler, overflow ? inf : 2);
      CHECK(one.optimizer.flush() == !overflow);
      if (update) scaler.update();
      one.micro_batch(scaler, 4);
      CHECK(one.optimizer.flush());
      CHECK(scaler.get_scale() == (overflow && update ? 4 : 8));
      scaler.update();
      CHECK(scaler.get_scale() == (overflow ? 4 : 8));
      CHECK(one.value() == (overflow ? -4 : -6));  // stepped without an overflow
      CHECK(tracker(scaler) == (overflow ? update : update + 1));
      scaler.update();
      CHECK(tracker(scaler) == (overflow ? update : update + 1));
    }
}

TEST_CASE("AmpScaler, windows: a discarded window does not count, unless it was unscaled") {
  for (bool overflow : {false, true})
    for (bool unscale : {false, true})
      for (bool goes_on : {false, true}) {
        One one;
        ga::AmpScaler scaler({.init_scale = 8});
        one.micro_batch(scaler, overflow ? inf : 2);
        scaler.scale(one.loss(4)).backward();
        if (unscale) scaler.unscale_(one.optimizer);
        one.optimizer.discard();
        if (goes_on) one.micro_batch(scaler, 2);
        scaler.update();
        CHECK(scaler.get_scale() == (overflow && unscale ? 4 : 8));
        CHECK(one.optimizer.micro_steps() == (goes_on && !(overflow && unscale)));
        if (!goes_on) CHECK(tracker(scaler) == (!overflow && unscale));
      }
}

TEST_CASE("AmpScaler, windows: growth waits until no window is open") {
  One two(2), three(3);
  ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
  for (int i = 1; i <= 12; ++i) {
    two.micro_batch(scaler, 1);
    three.micro_batch(scaler, 1);
    scaler.update();
    CHECK(scaler.get_scale() == (i < 6 ? 8 : i < 12 ? 16 : 32));
  }
  CHECK(two.value() == -6);
  CHECK(three.value() == -4);
}

TEST_CASE("AmpScaler, windows: clean windows while another was open count once, when none is open") {
  One one(1), two(2);
  ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 2});
  CHECK_FALSE(two.micro_batch(scaler, 1));
  for (int i = 0; i < 3; ++i) {
    CHECK(one.micro_batch(scaler, 1));
    scaler.update();
    CHECK(tracker(scaler) == 0);
  }
  two.optimizer.discard();
  scaler.update();
  CHECK(tracker(scaler) == 1);
  scaler.update();
  CHECK(tracker(scaler) == 1);
}

TEST_CASE("AmpScaler, windows: if an overflow changes the scale, windows with the old one are discarded") {
  for (bool flush : {false, true}) {
    One one(1), two(2), three(3);
    ga::AmpScaler scaler({.init_scale = 8});
    CHECK(one.micro_batch(scaler, 1));
    CHECK_FALSE(two.micro_batch(scaler, inf));
    CHECK_FALSE(three.micro_batch(scaler, 5));
    scaler.update();
    CHECK(tracker(scaler) == 0);  // growth waits
    if (flush) {
      CHECK_FALSE(two.optimizer.flush());
      CHECK(three.gradient() == 40);
      CHECK(three.optimizer.micro_steps() == 1);
    } else {
      CHECK_FALSE(two.micro_batch(scaler, 1));
    }
    CHECK(one.micro_batch(scaler, 1));
    scaler.update();
    CHECK(scaler.get_scale() == 4);
    CHECK(one.value() == -2);
    CHECK(three.optimizer.micro_steps() == 0);
    CHECK(three.gradient() == 0);
    for (double slope : {1, 2, 3}) CHECK(three.micro_batch(scaler, slope) == (slope == 3));
    CHECK(three.value() == -2);
    scaler.update();
    CHECK(tracker(scaler) == 1);
  }
}

TEST_CASE("AmpScaler, windows: update(new_scale) discards open windows, if it is new") {
  for (double scale : {8.0, 2.0}) {
    One one;
    ga::AmpScaler scaler({.init_scale = 8});
    one.micro_batch(scaler, 2);
    REQUIRE_ERROR("new_scale must be > 0", scaler.update(-1));
    CHECK(one.optimizer.micro_steps() == 1);
    scaler.update(scale);
    CHECK(one.optimizer.micro_steps() == (scale == 8));
    one.micro_batch(scaler, 4);
    if (scale == 2) one.micro_batch(scaler, 2);
    CHECK(one.value() == -3);
  }
}

TEST_CASE("AmpScaler, windows: an update that throws leaves windows open") {
  One one(1), two(2);
  ga::AmpScaler scaler({.init_scale = 8, .min_scale = 8});
  two.micro_batch(scaler, 2);
  one.micro_batch(scaler, inf);
  REQUIRE_ERROR("AmpScaler: the scale must stay >= min_scale (8)", scaler.update());
  CHECK(two.optimizer.micro_steps() == 1);
  CHECK(two.micro_batch(scaler, 4));
  CHECK(two.value() == -3);
}

TEST_CASE("AmpScaler, windows: a state is not loaded under an open window") {
  One one;
  ga::AmpScaler scaler({.init_scale = 8});
  const auto state = scaler.state_dict();
  one.micro_batch(scaler, 2);
  REQUIRE_ERROR("AmpScaler: load_state_dict() must not be called inside a window", scaler.load_state_dict(state));
  one.micro_batch(scaler, 4);
  scaler.load_state_dict(state);  // earlier results are dropped
  scaler.update();
  CHECK(tracker(scaler) == 0);
  CHECK(one.value() == -3);
}

TEST_CASE("AmpScaler, windows: accumulators may be destroyed before the scaler, and others created at their address") {
  ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
  std::optional<One> one;
  for (int i = 0; i < 3; ++i) {
    one.emplace();
    one->micro_batch(scaler, 2);  // its window stays open
  }
  scaler.update(4);
  CHECK(one->optimizer.micro_steps() == 0);
  one->micro_batch(scaler, 2);
  one.reset();
  scaler.update(2);
  scaler.update();
  CHECK(scaler.get_scale() == 2);
  one.emplace();
  CHECK_FALSE(one->micro_batch(scaler, 2));
  CHECK(one->micro_batch(scaler, 4));
  CHECK(one->value() == -3);
}

TEST_CASE("AmpScaler, windows: without weight or gradients nothing is updated, and the scale does not grow") {
  One one;
  ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
  for (int i = 0; i < 2; ++i) {
    one.optimizer.backward(scaler.scale(ga::Loss{one.loss(inf), 0}));
    CHECK_FALSE(scaler.step(one.optimizer));
  }
  scaler.update();
  CHECK(scaler.get_scale() == 8);
  for (int i = 0; i < 2; ++i) CHECK_FALSE(scaler.step(one.optimizer));
  scaler.update();
  CHECK(scaler.get_scale() == 8);
  CHECK(one.value() == 0);
  CHECK_FALSE(one.optimizer.flush());
}

TEST_CASE("AmpScaler, windows: a scaled, weighted window that the scaler does not step is detected") {
  for (bool flush : {false, true})
    for (bool joined : {false, true}) {
      One one(flush ? 4 : 2);
      ga::AmpScaler scaler({.init_scale = 8});
      one.optimizer.backward(scaler.scale(ga::Loss{one.loss(2)}));
      CHECK_FALSE((joined ? scaler.step(one.optimizer) : one.optimizer.step()));
      one.optimizer.backward(scaler.scale(ga::Loss{one.loss(4)}));
      const auto close = [&] { return flush ? one.optimizer.flush() : one.optimizer.step(); };
      if (!joined) REQUIRE_ERROR("call scaler.step(optimizer) instead", close());
      CHECK(one.value() == 0);
      if (!joined && flush) CHECK_FALSE(scaler.step(one.optimizer));  // nothing changed, so it can be repeated
      CHECK((joined || flush ? close() : scaler.step(one.optimizer)));
      CHECK(one.value() == -3);
    }
}

TEST_CASE("AmpScaler, windows: an exception in the middle") {
  auto weight = torch::zeros({2}).set_requires_grad(true);
  Breaks sgd({weight}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  ga::AmpScaler scaler({.init_scale = 8});
  const auto micro_batch = [&](double slope) {
    scaler.scale((weight * slope).sum()).backward();
    return scaler.step(optimizer);
  };
  micro_batch(2);
  REQUIRE_ERROR("step broke", micro_batch(4));
  REQUIRE_ERROR("GradAccumulator: an exception left this window's gradients incomplete; call discard()",
                scaler.step(optimizer));
  optimizer.discard();
  sgd.breaks = false;
  for (double slope : {2, 4}) CHECK(micro_batch(slope) == (slope == 4));
  CHECK(weight[0].item<float>() == -3);
  scaler.update();
  // If gradients vanish, the accumulator throws, and the scaler can continue.
  optimizer.zero_grad();
  micro_batch(2);
  weight.mutable_grad().reset();
  REQUIRE_ERROR("vanished inside a window", micro_batch(2));
  optimizer.discard();
  for (double slope : {2, 4}) CHECK(micro_batch(slope) == (slope == 4));
  CHECK(weight[0].item<float>() == -6);
}

TEST_CASE("AmpScaler, windows: sums kept in float32 for bfloat16 parameters") {
  auto weight = torch::zeros({2}, at::kBFloat16).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2, .accumulate_in = at::kFloat});
  ga::AmpScaler scaler({.init_scale = 8});
  for (double slope : {2.0, 4.0, inf, 1.0, 6.0}) {
    scaler.scale((weight * slope).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  CHECK(weight[0].item<float>() == -3);
  CHECK(scaler.get_scale() == 4);
  CHECK(optimizer.flush());
  CHECK(weight[0].item<float>() == -9);
}

TEST_CASE("AmpScaler, windows: sparse gradients") {
  const auto run = [](bool scaled) {
    torch::manual_seed(1);
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(6, 3).sparse(true));
    torch::optim::SGD sgd(embedding->parameters(), torch::optim::SGDOptions(0.5));
    ga::GradAccumulator optimizer(sgd, {.steps = 2});
    ga::AmpScaler scaler({.init_scale = 1024, .growth_interval = 1, .enabled = scaled});
    for (int i = 0; i < 5; ++i) {
      scaler.scale(embedding(torch::tensor({1, 2, 1, i})).square().mean()).backward();
      if (i == 3) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
    optimizer.flush();
    return embedding->weight.detach().clone();
  };
  CHECK(run(true).equal(run(false)));
}

TEST_CASE("AmpScaler, windows: an accumulator around a reference, and a separate optimizer") {
  One one(2), plain(1);
  torch::optim::Optimizer& reference = one.sgd;
  ga::GradAccumulator optimizer(reference, {.steps = 2});
  ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
  for (int i = 0; i < 4; ++i) {
    scaler.scale(one.loss(2) + plain.loss(3)).backward();
    CHECK(scaler.step(optimizer) == (i % 2 == 1));
    CHECK(scaler.step(plain.sgd));
    scaler.update();
    optimizer.zero_grad();
    plain.sgd.zero_grad();
    CHECK(scaler.get_scale() == 8 << ((i + 1) / 2));
  }
  CHECK(one.value() == -4);
  CHECK(plain.value() == -12);
}

TEST_CASE("AmpScaler, windows: with autocast, micro-batches match one large batch to float16's precision") {
  const auto data = make_batches({4, 4, 4, 4, 4, 4, 4, 4}, at::kFloat);
  const auto run = [&](bool amp) {
    auto model = make_model(at::kFloat);
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ga::GradAccumulator optimizer(sgd, {.steps = amp ? 4 : 1});
    ga::AmpScaler scaler({.enabled = amp});
    for (std::size_t i = 0; i < data.size(); i += amp ? 1 : 4) {
      const auto loss = [&] {
        ga::Autocast scope(at::kCPU, at::kHalf, amp);
        return loss_of(model, amp ? data[i] : joined(data, i, i + 4));
      }();
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
    return flat(model);
  };
  CHECK(distance(run(true), run(false)) < 2e-3);
  CHECK(distance(run(true), run(false)) > 1e-7);
}

TEST_CASE("AmpScaler, windows: on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  for (double last : {4.0, inf}) {
    auto weight = torch::zeros({2}, at::kCUDA).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1.0));
    ga::GradAccumulator optimizer(sgd, {.steps = 2});
    ga::AmpScaler scaler({.init_scale = 8, .growth_interval = 1});
    for (double slope : {2.0, last}) {
      scaler.scale((weight * slope).sum()).backward();
      optimizer.clip_grad_norm_(1e9);
      scaler.step(optimizer);
      scaler.update();
    }
    CHECK(weight[0].item<float>() == (last == 4 ? -3 : 0));
    CHECK(scaler.get_scale() == (last == 4 ? 16 : 4));
  }
}
