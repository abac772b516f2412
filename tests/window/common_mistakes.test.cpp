// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/graphed_step.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/verify_accumulation.hpp>

#include "support/device.hpp"
#include "support/models.hpp"

#include <cmath>
#include <vector>

// Mistakes that public C++ trainers contain, by hand and with the library: docs/from_python.md has the table.

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double rate = 0.1;

struct Run {
  torch::nn::Sequential model = make_model();
  torch::optim::SGD sgd{model->parameters(), rate};
  ga::GradAccumulator<torch::optim::SGD> optimizer{sgd, {.steps = 4}};
};

const std::vector<Example>& micro_batches() {
  static const auto all = make_batches(std::vector<std::int64_t>(8, 5));
  return all;
}

/// Trains on the windows' data as large batches.
at::Tensor of_large_batches(const auto& loss, const std::vector<std::size_t>& borders = {0, 4, 8}) {
  Run run;
  for (std::size_t i = 1; i < borders.size(); ++i) {
    run.sgd.zero_grad();
    loss(run.model, joined(micro_batches(), borders[i - 1], borders[i])).backward();
    run.sgd.step();
  }
  return flat(run.model);
}

/// Calls `train(run, batch, closes)` for each micro-batch; `closes` is true at every fourth one.
at::Tensor trained(const auto& train, std::size_t number = 8) {
  Run run;
  for (std::size_t i = 0; i < number; ++i) train(run, micro_batches()[i], i % 4 == 3);
  run.optimizer.flush();
  return flat(run.model);
}

const auto mse = [](auto& model, const Example& batch) { return loss_of(model, batch); };

void step_by_hand(Run& run, bool closes) {
  if (!closes) return;
  run.sgd.step();
  run.sgd.zero_grad();
}

}  // namespace

TEST_CASE("common mistakes: one of two losses is not divided by the number of micro-batches") {
  const auto penalty = [](auto& model, const Example& batch) { return model->forward(batch.data).square().mean(); };
  const auto expected =
      of_large_batches([&](auto& model, const Example& batch) { return mse(model, batch) + penalty(model, batch); });
  const auto by_hand = trained([&](Run& run, auto& batch, bool closes) {
    (mse(run.model, batch) / 4).backward();
    penalty(run.model, batch).backward();
    step_by_hand(run, closes);
  });
  CHECK(distance(by_hand, expected) > 1e-3);
  const auto with_library = trained([&](Run& run, auto& batch, bool) {
    mse(run.model, batch).backward();
    penalty(run.model, batch).backward();
    run.optimizer.step();
    run.optimizer.zero_grad();
  });
  CHECK(distance(with_library, expected) < 1e-12);
}

TEST_CASE("common mistakes: statistics of a micro-batch in place of the batch's") {
  const auto normalized = [](at::Tensor y) { return (y - y.mean()) / y.std(); };
  const auto loss = [&](auto& model, const Example& batch) {
    return torch::mse_loss(model->forward(batch.data), normalized(batch.target));
  };
  const auto expected = of_large_batches(loss);
  const auto by_hand = trained([&](Run& run, auto& batch, bool closes) {
    (loss(run.model, batch) / 4).backward();
    step_by_hand(run, closes);
  });
  CHECK(distance(by_hand, expected) > 1e-4);

  auto model = make_model();  // the check that the guide names finds it
  auto batch = joined(micro_batches(), 0, 4);
  CHECK_FALSE(ga::verify_accumulation(model, loss, batch, {.steps = 4}).exact());
  CHECK(ga::verify_accumulation(model, mse, batch, {.steps = 4}).exact());

  std::size_t i = 0;
  const auto with_library = trained([&](Run& run, auto& micro_batch, bool) {  // normalizes before the split
    const auto window = joined(micro_batches(), i / 4 * 4, i / 4 * 4 + 4);
    const auto targets = normalized(window.target).chunk(4);
    torch::mse_loss(run.model->forward(micro_batch.data), targets[i++ % 4]).backward();
    run.optimizer.step();
    run.optimizer.zero_grad();
  });
  CHECK(distance(with_library, expected) < 1e-12);
}

TEST_CASE("common mistakes: zero_grad in each micro-batch") {
  const auto expected = of_large_batches(mse);
  const auto by_hand = trained([](Run& run, auto& batch, bool closes) {
    run.sgd.zero_grad();
    (mse(run.model, batch) / 4).backward();
    if (closes) run.sgd.step();
  });
  CHECK(distance(by_hand, expected) > 1e-3);
  const auto with_library = trained([](Run& run, auto& batch, bool) {
    run.optimizer.zero_grad();
    mse(run.model, batch).backward();
    run.optimizer.step();
  });
  CHECK(distance(with_library, expected) < 1e-12);
  REQUIRE_ERROR("in place of model->zero_grad()", trained([](Run& run, auto& batch, bool) {
                  run.model->zero_grad();
                  mse(run.model, batch).backward();
                  run.optimizer.step();
                }));
}

TEST_CASE("common mistakes: a short last window, divided by the full number") {
  const auto expected = of_large_batches(mse, {0, 4, 6});
  Run run;
  for (std::size_t i = 0; i < 6; ++i) {
    (mse(run.model, micro_batches()[i]) / 4).backward();
    step_by_hand(run, i == 3 || i == 5);
  }
  CHECK(distance(flat(run.model), expected) > 1e-3);
  const auto with_library = trained(
      [](Run& with, auto& batch, bool) {
        mse(with.model, batch).backward();
        with.optimizer.step();
        with.optimizer.zero_grad();
      },
      6);
  CHECK(distance(with_library, expected) < 1e-12);
}

TEST_CASE("common mistakes: clipping of scaled gradients") {
  const auto clipped = [](double scale) {
    Run run;
    for (std::size_t from : {0u, 4u}) {
      run.sgd.zero_grad();
      (mse(run.model, joined(micro_batches(), from, from + 4)) * scale).backward();
      torch::nn::utils::clip_grad_norm_(run.model->parameters(), 0.1);
      for (auto& p : run.model->parameters()) p.mutable_grad().div_(scale);
      run.sgd.step();
    }
    return flat(run.model);
  };
  const auto expected = clipped(1), of_scaled = clipped(1024);
  CHECK(distance(of_scaled, expected) > 1e-3);
  ga::AmpScaler scaler({.init_scale = 1024});
  const auto with_library = trained([&](Run& run, auto& batch, bool) {
    scaler.scale(mse(run.model, batch)).backward();
    run.optimizer.clip_grad_norm_(0.1);
    scaler.step(run.optimizer);
    scaler.update();
    run.optimizer.zero_grad();
  });
  CHECK(distance(with_library, expected) < 1e-6);  // LibTorch's norm is rounded to float32
  ga::AmpScaler other({.init_scale = 1024});
  REQUIRE_ERROR("call optimizer.clip_grad_norm_(max) instead", trained([&](Run& run, auto& batch, bool) {
                  other.scale(mse(run.model, batch)).backward();
                  torch::nn::utils::clip_grad_norm_(run.model->parameters(), 0.1);
                  other.step(run.optimizer);
                  other.update();
                  run.optimizer.zero_grad();
                }));
}

TEST_CASE("common mistakes: a graph with the rate and the count of steps of its capture", "[cuda]") {
  const auto device = at::Device(at::kCUDA, 0);
  if (!has_graphs(device)) SKIP("needs a device whose work can be captured");
  const Example batch{micro_batches()[0].data.to(device), micro_batches()[0].target.to(device)};
  const auto objective = [](auto& model, const Example& of) { return loss_of(model, of); };
  const auto train = [&](bool graphed, bool frozen) {
    auto model = make_model();
    model->to(device);
    ga::optim::Adam adam(model->parameters(), ga::optim::AdamOptions(0.05));
    ga::GradAccumulator optimizer(adam, {.steps = 1});
    ga::LearningRates rates(optimizer);
    ga::GraphedStep step(model, objective);
    for (int i = 0; i < 8; ++i) {
      rates.set(frozen ? 0.05 : 0.05 / (1 + i));
      optimizer.backward(graphed ? step(batch) : objective(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    CHECK((step.report().replayed > 0) == graphed);
    return flat(model).cpu();
  };
  const auto expected = train(/*graphed=*/false, /*frozen=*/false);
  CHECK(distance(train(false, true), expected) > 1e-3);
  CHECK(distance(train(true, false), expected) < 1e-9);
}
