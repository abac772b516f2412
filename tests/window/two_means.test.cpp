// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/trainer.hpp>

#include "support/models.hpp"
#include "support/ranks.hpp"

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

// A loss that is a mean over tokens, and another that is a mean over rows. The oracle is one large batch.

namespace ga = gradaccum;
using namespace testing;

namespace {

/// Rows, of which the first `tokens` count for the first mean.
struct Batch {
  Example rows;
  std::int64_t tokens = 0;
  double rows_weigh = 0;  ///< one row, in tokens of the window

  std::int64_t size() const { return rows.data.size(0); }
};

std::vector<Batch> window_of(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& tokens,
                             double all_tokens = 0, double all_rows = 0) {
  std::vector<Batch> batches;
  const auto rows = make_batches(sizes);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    batches.push_back({rows[i], tokens[i]});
    all_tokens += static_cast<double>(tokens[i]);
    all_rows += static_cast<double>(sizes[i]);
  }
  for (auto& batch : batches) batch.rows_weigh = all_tokens / all_rows;
  return batches;
}

/// Returns both means.
template <class Model>
std::pair<at::Tensor, at::Tensor> means_of(Model& model, const Batch& batch) {
  const auto output = model->forward(batch.rows.data);
  const auto tokens = torch::mse_loss(output.slice(0, 0, batch.tokens), batch.rows.target.slice(0, 0, batch.tokens));
  return {tokens, output.square().sum(1).mean()};
}

const auto objective = [](auto& model, const Batch& batch) {
  const auto [tokens, rows] = means_of(model, batch);
  return ga::Loss{tokens, batch.tokens}.plus(rows, static_cast<double>(batch.size()) * batch.rows_weigh);
};

/// The oracle: gradients of the sums over all batches, divided by the counts of all.
at::Tensor of_large_batch(const std::vector<Batch>& batches) {
  auto model = make_model();
  at::Tensor all_tokens = torch::zeros({}, at::kDouble), all_rows = torch::zeros({}, at::kDouble);
  double tokens = 0, rows = 0;
  for (auto& batch : batches) {
    const auto [of_tokens, of_rows] = means_of(model, batch);
    all_tokens = all_tokens + of_tokens * batch.tokens;
    all_rows = all_rows + of_rows * batch.size();
    tokens += static_cast<double>(batch.tokens);
    rows += static_cast<double>(batch.size());
  }
  (all_tokens / tokens + all_rows / rows).backward();
  torch::optim::SGD(model->parameters(), 1.0).step();
  return flat(model);
}

using Objective = std::function<ga::Loss(torch::nn::Sequential&, const Batch&)>;

at::Tensor of_window(const std::vector<Batch>& batches, const Objective& of = objective, double scale = 1) {
  auto model = make_model();
  ga::optim::SGD sgd(model->parameters(), 1.0);
  ga::GradAccumulator optimizer(sgd, {.steps = std::ssize(batches)});
  ga::AmpScaler scaler({.init_scale = scale, .enabled = scale != 1});
  for (auto& batch : batches) {
    optimizer.backward(scaler.scale(of(model, batch)));
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  CHECK(optimizer.updates() == 1);
  return flat(model);
}

const auto uneven = [] { return window_of({7, 4, 9}, {2, 4, 3}); };

/// Returns its first input, and trains the penalty by `weight` relative to the loss's items.
struct Injects : torch::autograd::Function<Injects> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& /*penalty*/, double weight) {
    context->saved_data["weight"] = weight;
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], ga::backward_seed() * context->saved_data["weight"].toDouble(), at::Tensor()};
  }
};

ga::Loss injecting(torch::nn::Sequential& model, const Batch& batch) {
  auto output = model->forward(batch.rows.data);
  const auto weight = static_cast<double>(batch.size()) * batch.rows_weigh / static_cast<double>(batch.tokens);
  output = Injects::apply(output, output.square().sum(1).mean(), weight);
  return {torch::mse_loss(output.slice(0, 0, batch.tokens), batch.rows.target.slice(0, 0, batch.tokens)), batch.tokens};
}

}  // namespace

TEST_CASE("Loss: plus() a mean over other items is exact against the large batch") {
  const auto batches = uneven();
  const auto expected = of_large_batch(batches);
  CHECK(distance(of_window(batches), expected) < 1e-14);
  CHECK(distance(of_window(batches, objective, 1024), expected) < 1e-14);
  // negative controls: the sum of both means, and means of both over micro-batches
  CHECK(distance(of_window(batches,
                           [](auto& model, auto& batch) {
                             const auto [tokens, rows] = means_of(model, batch);
                             return ga::Loss{tokens + rows, batch.tokens};
                           }),
                 expected) > 1e-2);
  CHECK(distance(of_window(batches,
                           [](auto& model, auto& batch) {
                             const auto [tokens, rows] = means_of(model, batch);
                             return ga::Loss{tokens + rows};
                           }),
                 expected) > 1e-2);
}

TEST_CASE("Loss: plus() in a Trainer, whose batches carry the window's counts, and of several ranks") {
  const auto batches = uneven();
  const auto expected = of_large_batch(batches);
  const auto train = [](const std::vector<Batch>& share, const auto&... policies) {
    auto model = make_model();
    ga::optim::SGD sgd(model->parameters(), 1.0);
    ga::Trainer trainer(model, sgd, objective, policies...);
    CHECK(trainer.fit(share).updates == 1);
    CHECK(trainer.evaluate(share)["loss"] > 0);  // without gradients
    return flat(model);
  };
  CHECK(distance(train(batches, ga::Accumulate{.steps = 3}), expected) < 1e-14);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto share = group.rank() == 0 ? std::vector<Batch>{batches[0], batches[1]} : std::vector<Batch>{batches[2]};
    CHECK(distance(train(share, ga::Accumulate{.steps = 2}, ga::DataParallel{.group = group}), expected) < 1e-14);
  });
}

TEST_CASE("backward_seed: an injected gradient gets the weight and the loss scale of its micro-batch") {
  const auto batches = uneven();
  const auto expected = of_large_batch(batches);
  CHECK(distance(of_window(batches, injecting), expected) < 1e-14);
  CHECK(distance(of_window(batches, injecting, 1024), expected) < 1e-14);
  const auto checkpointed = [](torch::nn::Sequential& model, const Batch& batch) {
    const auto weight = static_cast<double>(batch.size()) * batch.rows_weigh / static_cast<double>(batch.tokens);
    const auto output = ga::checkpoint(
        [&](const at::Tensor& x) {
          const auto result = model->forward(x);
          return Injects::apply(result, result.square().sum(1).mean(), weight);
        },
        batch.rows.data);
    return ga::Loss{torch::mse_loss(output.slice(0, 0, batch.tokens), batch.rows.target.slice(0, 0, batch.tokens)),
                    batch.tokens};
  };
  CHECK(distance(of_window(batches, checkpointed), expected) < 1e-14);
}

TEST_CASE("backward_seed: is 1 outside of Loss::backward, and the loss's own gradient inside") {
  CHECK(ga::backward_seed().item<double>() == 1);
  const auto x = torch::ones({}, at::kDouble).requires_grad_();
  double seen = 0;
  auto loss = ga::Loss{x * 3};
  loss.mean.register_hook([&](const at::Tensor& seed) {
    CHECK(ga::backward_seed().item<double>() == seed.item<double>());
    seen = seed.item<double>();
  });
  loss.seed.multiply(8);
  loss.backward({.retain_graph = true});
  CHECK(seen == 8);
  loss.seed.multiply(torch::full({}, 0.5));
  loss.backward({.retain_graph = true});
  CHECK(seen == 4);
  CHECK(ga::backward_seed().item<double>() == 1);
}

TEST_CASE("Loss: plus() keeps items, output and target, and refuses what has no weight") {
  const auto x = torch::ones({2}, at::kDouble).requires_grad_();
  const auto loss = ga::Loss{x.mean(), 4}.with(x, x * 2).plus(x.sum(), 2);
  CHECK(loss.mean.item<double>() == 2);
  CHECK(loss.items == 4);
  CHECK(loss.output.is_same(x));
  CHECK(ga::Loss{x.mean(), 4}.plus(x.sum(), 0).mean.item<double>() == 1);
  REQUIRE_ERROR("items must be > 0 to add another loss to it, got 0", ga::Loss(x.mean(), 0).plus(x.sum(), 1));
  REQUIRE_ERROR("must be finite and >= 0, got -1", ga::Loss(x.mean(), 1).plus(x.sum(), -1));
  REQUIRE_ERROR("must be finite and >= 0, got nan",
                ga::Loss(x.mean(), 1).plus(x.sum(), std::numeric_limits<double>::quiet_NaN()));
  REQUIRE_ERROR("one element", ga::Loss(x.mean(), 1).plus(x, 1));
}
