// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>

#include "support/models.hpp"

#include <functional>
#include <memory>

// Micro-batches give the result of one large batch: for all optimizers, dtypes, tails and uneven micro-batches. Each
// test has a control that detects the usual mistakes.

namespace ga = gradaccum;
using namespace testing;

namespace {

using Parameters = std::vector<at::Tensor>;
using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;
struct Kind {
  std::string name;
  std::function<OptimizerPointer(Parameters)> make;
};

template <class Optimizer, class Options>
Kind kind(const std::string& name, Options options) {
  return {name, [=](Parameters parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); }};
}

std::vector<Kind> every_optimizer() {
  using namespace torch::optim;
  return {
      kind<SGD>("SGD", SGDOptions(0.1)),
      kind<SGD>("SGD momentum", SGDOptions(0.1).momentum(0.9).weight_decay(1e-2)),
      kind<SGD>("SGD nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
      kind<Adam>("Adam", AdamOptions(1e-2).weight_decay(1e-2)),
      kind<Adam>("Adam amsgrad", AdamOptions(1e-2).amsgrad(true)),
      kind<AdamW>("AdamW", AdamWOptions(1e-2)),
      kind<RMSprop>("RMSprop", RMSpropOptions(1e-2).momentum(0.9)),
      kind<Adagrad>("Adagrad", AdagradOptions(1e-2)),
  };
}

// Makes one step for every `steps` micro-batches joined to one batch: the reference.
at::Tensor one_large_batch(const Kind& kind, const std::vector<Example>& data, std::size_t steps, double clip = 0) {
  auto model = make_model(data.front().data.scalar_type());
  auto optimizer = kind.make(model->parameters());
  for (std::size_t from = 0; from < data.size(); from += steps) {
    optimizer->zero_grad();
    loss_of(model, joined(data, from, from + steps)).backward();
    if (clip > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), clip);
    optimizer->step();
  }
  return flat(model);
}

// Runs the drop-in loop, with zero_grad first or last.
at::Tensor drop_in(const Kind& kind, const std::vector<Example>& data, std::int64_t steps, bool zero_first,
                   double clip = 0) {
  auto model = make_model(data.front().data.scalar_type());
  auto wrapped = kind.make(model->parameters());
  ga::GradAccumulator optimizer(*wrapped, {.steps = steps});
  for (auto& batch : data) {
    if (zero_first) optimizer.zero_grad();
    loss_of(model, batch).backward();
    if (clip > 0) optimizer.clip_grad_norm_(clip);
    optimizer.step();
    if (!zero_first) optimizer.zero_grad();
  }
  optimizer.flush();
  return flat(model);
}

// Weights each micro-batch by its rows.
at::Tensor weighted(const Kind& kind, const std::vector<Example>& data, std::int64_t steps, double clip = 0) {
  auto model = make_model(data.front().data.scalar_type());
  auto wrapped = kind.make(model->parameters());
  ga::GradAccumulator optimizer(*wrapped, {.steps = steps});
  for (auto& batch : data) {
    optimizer.backward(ga::Loss{loss_of(model, batch), batch.data.size(0)});
    if (clip > 0) optimizer.clip_grad_norm_(clip);
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.flush();
  return flat(model);
}

// Mistake 1: every window divided by the nominal number of steps, a shorter last one too.
at::Tensor divided_by_nominal(const Kind& kind, const std::vector<Example>& data, std::size_t steps) {
  auto model = make_model(data.front().data.scalar_type());
  auto optimizer = kind.make(model->parameters());
  for (std::size_t i = 0; i < data.size(); ++i) {
    (loss_of(model, data[i]) / double(steps)).backward();
    if ((i + 1) % steps != 0 && i + 1 != data.size()) continue;
    optimizer->step();
    optimizer->zero_grad();
  }
  return flat(model);
}

// Mistake 2: steps when batch_idx % steps == 0. The first window has one micro-batch, the last ones are lost.
at::Tensor steps_at_multiples(const Kind& kind, const std::vector<Example>& data, std::size_t steps) {
  auto model = make_model(data.front().data.scalar_type());
  auto optimizer = kind.make(model->parameters());
  for (std::size_t i = 0; i < data.size(); ++i) {
    (loss_of(model, data[i]) / double(steps)).backward();
    if (i % steps != 0) continue;
    optimizer->step();
    optimizer->zero_grad();
  }
  return flat(model);
}

const std::vector<std::int64_t> even(10, 5), uneven{3, 5, 2, 6, 1, 4, 4, 7, 2, 5};
double tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-11 : 2e-4; }

}  // namespace

TEST_CASE("equivalence: a window of equal micro-batches equals one large batch, the tail too") {
  for (auto& kind : every_optimizer())
    for (auto dtype : {at::kDouble, at::kFloat})
      for (std::int64_t steps : {1, 2, 4, 10, 16}) {  // tails of 0, 0, 2, 0 and all micro-batches
        INFO(kind.name << ", " << dtype << ", steps " << steps);
        const auto data = make_batches(even, dtype);
        const auto expected = one_large_batch(kind, data, steps);
        CHECK(distance(drop_in(kind, data, steps, /*zero_first=*/false), expected) < tolerance(dtype));
        CHECK(distance(drop_in(kind, data, steps, /*zero_first=*/true), expected) < tolerance(dtype));
        CHECK(distance(weighted(kind, data, steps), expected) < tolerance(dtype));
      }
}

TEST_CASE("equivalence: zero_grad first or last gives the same bits") {
  for (auto& kind : every_optimizer()) {
    const auto data = make_batches(even, at::kFloat);
    CHECK(drop_in(kind, data, 4, true).equal(drop_in(kind, data, 4, false)));
  }
}

TEST_CASE("equivalence: one step per window gives the bits of the plain loop") {
  for (auto& kind : every_optimizer()) {
    const auto data = make_batches(uneven, at::kFloat);
    CHECK(drop_in(kind, data, 1, false).equal(one_large_batch(kind, data, 1)));
  }
}

TEST_CASE("equivalence: uneven micro-batches need their weights") {
  for (auto& kind : every_optimizer())
    for (std::int64_t steps : {3, 4}) {
      INFO(kind.name << ", steps " << steps);
      const auto data = make_batches(uneven);
      const auto expected = one_large_batch(kind, data, steps);
      CHECK(distance(weighted(kind, data, steps), expected) < 1e-11);
      // Control: the mean of means differs.
      CHECK(distance(drop_in(kind, data, steps, false), expected) > 1e-4);
    }
}

TEST_CASE("equivalence: the usual mistakes give different results") {
  const auto data = make_batches(even);
  for (auto& kind : every_optimizer()) {
    INFO(kind.name);
    const auto expected = one_large_batch(kind, data, 4);
    CHECK(distance(divided_by_nominal(kind, data, 4), expected) > 1e-4);
    CHECK(distance(steps_at_multiples(kind, data, 4), expected) > 1e-4);
  }
  // Without a shorter window, dividing by the nominal number is correct.
  CHECK(distance(divided_by_nominal(every_optimizer()[0], data, 5), one_large_batch(every_optimizer()[0], data, 5)) <
        1e-12);
}

TEST_CASE("equivalence: clipping applies to the large batch's gradient") {
  const auto data = make_batches(uneven);
  for (auto& kind : every_optimizer())
    for (double clip : {0.05, 1e6}) {  // clips every window, and none
      INFO(kind.name << ", clip " << clip);
      CHECK(distance(weighted(kind, data, 4, clip), one_large_batch(kind, data, 4, clip)) < 1e-11);
      CHECK(distance(drop_in(kind, make_batches(even), 4, false, clip),
                     one_large_batch(kind, make_batches(even), 4, clip)) < 1e-11);
    }
  // Control: clipping has an effect.
  const auto sgd = every_optimizer()[0];
  CHECK(distance(one_large_batch(sgd, data, 4, 0.05), one_large_batch(sgd, data, 4)) > 1e-3);
}

TEST_CASE("equivalence: a window may carry on into the next epoch") {
  const auto sgd = every_optimizer()[1];
  const auto epoch = make_batches(even);
  auto twice = epoch;
  twice.insert(twice.end(), epoch.begin(), epoch.end());
  auto model = make_model();
  auto wrapped = sgd.make(model->parameters());
  ga::GradAccumulator optimizer(*wrapped, {.steps = 4});
  int moved = 0;
  for (int e = 0; e < 2; ++e)
    for (auto& batch : epoch) {
      optimizer.zero_grad();
      loss_of(model, batch).backward();
      moved += optimizer.step();
    }
  CHECK(moved == 5);
  CHECK_FALSE(optimizer.flush());  // 20 micro-batches are 5 full windows
  CHECK(distance(flat(model), one_large_batch(sgd, twice, 4)) < 1e-12);
}

TEST_CASE("equivalence: the number of updates is ceil(micro-batches / steps) if windows are flushed") {
  for (std::int64_t steps : {1, 3, 4, 7, 10, 11}) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::GradAccumulator optimizer(sgd, {.steps = steps});
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : make_batches(even)) {
        loss_of(model, batch).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      optimizer.flush();
    }
    CHECK(optimizer.updates() == 2 * ((10 + steps - 1) / steps));
  }
}
