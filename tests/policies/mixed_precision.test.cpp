// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/trainer.hpp>

#include <ATen/autocast_mode.h>

#include "support/models.hpp"

namespace ga = gradaccum;
using namespace testing;

namespace {

// Records the dtype of the objective's matrix products.
struct Seen {
  at::ScalarType forward = at::kFloat;
  bool backward_in_autocast = true;
};

auto objective_that_tells(Seen& seen) {
  return [&seen](auto& net, auto& batch) {
    const auto output = net->forward(batch.data);
    seen.forward = output.scalar_type();
    auto loss = torch::mse_loss(output, batch.target);
    if (loss.requires_grad())
      loss.register_hook(
          [&seen](const at::Tensor&) { seen.backward_in_autocast = at::autocast::is_autocast_enabled(at::kCPU); });
    return loss;
  };
}

}  // namespace

TEST_CASE("MixedPrecision: the objective runs in 16 bits, in training and evaluation; backward outside of autocast") {
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  Seen seen;
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  ga::Trainer trainer(model, sgd, objective_that_tells(seen), ga::MixedPrecision{.dtype = dtype});
  trainer.fit(make_batches({3}, at::kFloat));
  CHECK(seen.forward == dtype);
  CHECK_FALSE(seen.backward_in_autocast);
  CHECK(model->parameters()[0].scalar_type() == at::kFloat);
  seen.forward = at::kFloat;
  trainer.evaluate(make_batches({3}, at::kFloat));
  CHECK(seen.forward == dtype);
}

TEST_CASE("MixedPrecision: switched off, it does nothing") {
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  Seen seen;
  ga::Trainer trainer(model, sgd, objective_that_tells(seen), ga::MixedPrecision{.dtype = at::kHalf, .enabled = false});
  trainer.fit(make_batches({3}, at::kFloat));
  CHECK(seen.forward == at::kFloat);
  CHECK_FALSE(trainer.policy<ga::MixedPrecision>().amp_scaler().is_enabled());
}

TEST_CASE("MixedPrecision: only float16 has a loss scale, made of its options") {
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  const auto objective = [](auto& net, auto& batch) { return loss_of(net, batch); };
  ga::Trainer half(model, sgd, objective, ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 32.0}});
  CHECK(half.policy<ga::MixedPrecision>().amp_scaler().get_scale() == 32.0);
  ga::Trainer brain(model, sgd, objective, ga::MixedPrecision{.scaler = {.init_scale = 32.0}});
  CHECK(brain.policy<ga::MixedPrecision>().amp_scaler().get_scale() == 1.0);
  ga::Trainer unscaled(model, sgd, objective, ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.enabled = false}});
  CHECK(unscaled.policy<ga::MixedPrecision>().amp_scaler().get_scale() == 1.0);
}

TEST_CASE("MixedPrecision: skipped windows without an overflow do not make the scale grow") {
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  double items = 1;
  ga::Trainer trainer(
      model, sgd,
      [&](auto& net, auto& batch) {
        return ga::Loss{loss_of(net, batch), items};
      },
      ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 8.0, .growth_interval = 2}});
  const auto& scaler = trainer.policy<ga::MixedPrecision>().amp_scaler();
  const auto batches = make_batches({3, 3, 3}, at::kFloat);
  items = 0;
  CHECK(trainer.fit(batches).skipped == 3);
  CHECK(scaler.get_scale() == 8.0);
  items = 1;
  trainer.fit(batches);
  CHECK(scaler.get_scale() == 16.0);
}

TEST_CASE("MixedPrecision: a scale that overflows cannot lower enough is an error") {
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  ga::Trainer trainer(
      model, sgd, [](auto& net, auto& batch) { return loss_of(net, batch) * 1e38; },
      ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 8.0, .min_scale = 4.0}});
  REQUIRE_ERROR("the scale must stay >= min_scale (4)", trainer.fit(make_batches({3, 3, 3}, at::kFloat)));
}

TEST_CASE("MixedPrecision: invalid options are refused when the trainer is built") {
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  const auto objective = [](auto& net, auto& batch) { return loss_of(net, batch); };
  REQUIRE_ERROR("Autocast: dtype must be bfloat16 or float16",
                ga::Trainer(model, sgd, objective, ga::MixedPrecision{.dtype = at::kDouble}));
  model->to(at::kHalf);
  REQUIRE_ERROR("AmpScaler: parameters and gradients must not be float16",
                ga::Trainer(model, sgd, objective, ga::MixedPrecision{.dtype = at::kHalf}));
}
