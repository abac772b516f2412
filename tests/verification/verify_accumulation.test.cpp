// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/autocast.hpp>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/verify_accumulation.hpp>

#include "support/models.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>

namespace ga = gradaccum;
using namespace testing;
using torch::nn::Sequential;

namespace {

Example make_batch(std::int64_t rows, at::ScalarType dtype = at::kDouble) {
  return make_batches({rows}, dtype).front();
}

const auto mean_loss = [](auto& model, const auto& batch) {
  return torch::mse_loss(model->forward(batch.data), batch.target);
};

template <class... Layers>
Sequential make(Layers&&... layers) {
  torch::manual_seed(1);
  Sequential model(std::forward<Layers>(layers)...);
  model->to(at::kDouble);
  return model;
}

torch::nn::Linear linear(std::int64_t in, std::int64_t out) { return torch::nn::Linear(in, out); }

// The state that must not change.
struct Fingerprint {
  std::vector<at::Tensor> values, gradients, gradient_values;
  std::vector<bool> modes;
  at::Tensor random_state;

  explicit Fingerprint(const torch::nn::Module& model) {
    for (auto& parameter : model.parameters()) {
      values.push_back(parameter.detach().clone());
      gradients.push_back(parameter.grad());
      gradient_values.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    for (auto& buffer : model.buffers()) values.push_back(buffer.clone());
    modes.push_back(model.is_training());
    for (auto& part : model.modules(false)) modes.push_back(part->is_training());
    random_state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  }
};

// Returns the parts of the state that changed; empty if there are none.
std::string changes(const Fingerprint& before, const torch::nn::Module& model) {
  const Fingerprint after(model);
  const auto equal = [](auto& a, auto& b) { return a.defined() == b.defined() && (!a.defined() || a.equal(b)); };
  const auto same = [](auto& a, auto& b) { return a.is_same(b); };
  const auto all = [](auto& a, auto& b, auto& test) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), test);
  };
  return std::string(all(before.values, after.values, equal) ? "" : "values ") +
         (all(before.gradients, after.gradients, same) ? "" : "gradients ") +
         (all(before.gradient_values, after.gradient_values, equal) ? "" : "gradient values ") +
         (before.modes == after.modes ? "" : "modes ") +
         (before.random_state.equal(after.random_state) ? "" : "random");
}

bool has_cause(const ga::AccumulationReport& report, const std::string& part) {
  for (auto& cause : report.causes)
    if (contains(cause, part)) return true;
  return false;
}

// Requires a report with these causes and no others, and an unchanged model.
template <class Model, class Objective, class Batch>
ga::AccumulationReport require_causes(const std::vector<std::string>& causes, Model& model, Objective objective,
                                      const Batch& batch, ga::VerifyAccumulationOptions options = {.steps = 4}) {
  const Fingerprint before(*model);
  const auto report = ga::verify_accumulation(model, objective, batch, options);
  INFO(report);
  CHECK(changes(before, *model) == "");
  for (auto& cause : causes) CHECK(has_cause(report, cause));
  CHECK(report.causes.size() == causes.size());
  CHECK(report.exact() == causes.empty());
  return report;
}

// Computes with LibTorch only: gradients of one batch, and the mean of the micro-batches'.
std::vector<double> errors_by_hand(Sequential& model, const std::vector<Example>& parts) {
  const auto gradients = [&](const Example& batch) {
    model->zero_grad();
    mean_loss(model, batch).backward();
    std::vector<at::Tensor> all;
    for (auto& parameter : model->parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  const auto whole = gradients(joined(parts, 0, parts.size()));
  std::vector<at::Tensor> mean;
  for (auto& gradient : whole) mean.push_back(torch::zeros_like(gradient));
  for (auto& part : parts) {
    const auto one = gradients(part);
    for (std::size_t i = 0; i < one.size(); ++i) mean[i] += one[i] / static_cast<double>(parts.size());
  }
  std::vector<double> errors;
  for (std::size_t i = 0; i < whole.size(); ++i) errors.push_back(testing::distance(mean[i], whole[i]));
  model->zero_grad();
  return errors;
}

// Returns the mean over the labels that are not -100, as of a language model.
const auto token_loss = [](auto& model, const auto& batch) {
  return torch::cross_entropy_loss(model->forward(batch.data).flatten(0, 1), batch.target.flatten());
};
Example token_batch() {
  torch::manual_seed(9);
  const Example batch(torch::randn({8, 5, 4}, at::kDouble), torch::randint(3, {8, 5}));
  for (std::int64_t row = 0; row < 8; ++row) batch.target[row].slice(0, 1 + row % 4) = -100;
  return batch;
}

// Adds noise in every mode.
struct Noise : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + torch::randn_like(x); }
};

// A counter in a buffer, which has no effect on results.
struct Counter : torch::nn::Module {
  Counter() : count(register_buffer("count", torch::zeros({}))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) count += 1;
    return x;
  }
  at::Tensor count;
};

// Subtracts the batch's mean in training mode, without state.
struct Centre : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return is_training() ? x - x.mean(0, true) : x; }
};

// Modules inside of a module.
struct Block : torch::nn::Module {
  explicit Block(Sequential modules) : inner(register_module("inner", std::move(modules))) {}
  at::Tensor forward(const at::Tensor& x) { return x + inner->forward(x); }
  Sequential inner;
};

// The usual contrastive loss: each sample's scores are over all samples of the batch.
const auto contrastive_loss = [](auto& model, const auto& batch) {
  const auto scores = model->forward(batch.data).matmul(batch.target.t());
  return torch::cross_entropy_loss(scores, torch::arange(scores.size(0)));
};

// Divides by the largest values so far, which are in a member and not in a buffer.
struct RunningMax : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto now = x.detach().abs().amax(0, /*keepdim=*/true);
    most = most.defined() ? torch::max(most, now) : now;
    return x / most;
  }
  at::Tensor most;
};

// Keeps a running mean of given values in a buffer, and returns its input.
struct Baseline : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
  at::Tensor update(const at::Tensor& value) {  // returns the previous mean
    const auto before = mean.clone();
    mean.mul_(0.9).add_(value.detach(), 0.1);
    return before;
  }
  at::Tensor mean = register_buffer("mean", torch::zeros({}));
};

// Reads sequences, and begins with the state of the rows before, if their number was the same.
struct Reader : torch::nn::Module {
  Reader()
      : lstm(register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 6).batch_first(true)))),
        last(register_module("last", linear(6, 3))) {
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!h.defined() || h.size(1) != x.size(0)) h = c = torch::zeros({1, x.size(0), 6}, at::kDouble);
    auto [out, next] = lstm->forward(x, std::make_tuple(h, c));
    h = std::get<0>(next).detach(), c = std::get<1>(next).detach();
    return last->forward(out.select(1, -1));
  }
  torch::nn::LSTM lstm;
  torch::nn::Linear last;
  at::Tensor h, c;
};

// The dice loss of segmentation: a ratio of sums over the batch.
const auto dice_loss = [](auto& model, const auto& batch) {
  const auto found = model->forward(batch.data).to(at::kFloat).sigmoid();
  return 1 - (2 * (found * batch.target).sum() + 1) / (found.sum() + batch.target.sum() + 1);
};

}  // namespace

TEST_CASE("verify_accumulation: a plain network is exact, in float64 and in float32") {
  for (auto dtype : {at::kDouble, at::kFloat}) {
    auto model = make_model(dtype);
    const auto report = require_causes({}, model, mean_loss, make_batch(12, dtype));
    CHECK(report.tolerance == (dtype == at::kDouble ? 1e-10 : 1e-4));
    CHECK(report.steps == 4);
    CHECK(report.worst() < (dtype == at::kDouble ? 1e-14 : 1e-5));
    REQUIRE(report.parameters.size() == 4);
    CHECK(report.parameters[0].name == "0.weight");
  }
}

TEST_CASE("verify_accumulation: errors equal a computation by hand") {
  auto model = make(linear(4, 6), torch::nn::BatchNorm1d(6), linear(6, 3));
  const auto parts = make_batches({3, 3, 3, 3});
  const auto report = ga::verify_accumulation(model, mean_loss, joined(parts, 0, 4), {.steps = 4});
  const auto expected = errors_by_hand(model, parts);
  REQUIRE(report.parameters.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (report.parameters[i].name == "0.bias") continue;  // a gradient of 0 up to rounding
    CHECK(report.parameters[i].relative_error == Approx(expected[i]).epsilon(1e-9));
    if (contains(report.parameters[i].name, "weight")) CHECK(expected[i] > 1e-3);
  }
}

TEST_CASE("verify_accumulation: normalization within a sample is exact, and over the batch it is named") {
  const auto batch = make_batch(12);
  auto layer = make(linear(4, 6), torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})), linear(6, 3));
  require_causes({}, layer, mean_loss, batch);
  auto group = make(linear(4, 6), torch::nn::GroupNorm(2, 6), linear(6, 3));
  require_causes({}, group, mean_loss, batch);

  auto norm = make(linear(4, 6), torch::nn::BatchNorm1d(6), linear(6, 3));
  const auto report = require_causes({"1 (BatchNorm1d): computes over its whole batch"}, norm, mean_loss, batch);
  CHECK(report.worst() > 1e-3);
  norm->eval();  // frozen statistics are not a cause
  require_causes({}, norm, mean_loss, batch);
  norm->train();
  norm[1]->as<torch::nn::BatchNorm1d>()->eval();
  require_causes({}, norm, mean_loss, batch);
}

TEST_CASE("verify_accumulation: a BatchNorm without running statistics is named in evaluation mode, too") {
  auto model = make(linear(4, 6), torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(6).track_running_stats(false)),
                    linear(6, 3));
  require_causes({"BatchNorm without running statistics"}, model, mean_loss, make_batch(12));
}

TEST_CASE("verify_accumulation: a module that works on the batch in training mode is named, with buffers or without") {
  auto model = make(linear(4, 6), std::make_shared<Centre>(), std::make_shared<Counter>(), linear(6, 3));
  require_causes({"1 (Centre): computes over its whole batch in training mode"}, model, mean_loss, make_batch(12));
  auto counter = make(linear(4, 6), std::make_shared<Counter>(), linear(6, 3));
  require_causes({}, counter, mean_loss, make_batch(12));
}

TEST_CASE("verify_accumulation: dropout is named by module, two of them and nested, and no other module") {
  const auto inner = std::make_shared<Block>(Sequential(torch::nn::ReLU(), torch::nn::Dropout(0.3)));
  auto model = make(linear(4, 6), torch::nn::Dropout(0.5), std::make_shared<Block>(Sequential(linear(6, 6), inner)),
                    linear(6, 3));
  const auto report = require_causes({"draws random numbers in training mode"}, model, mean_loss, make_batch(12));
  CHECK(contains(report.causes[0], "1 (Dropout), 2.inner.1.inner.1 (Dropout): "));
  CHECK(!contains(report.causes[0], "Linear"));
  CHECK(!contains(report.causes[0], "Block"));
  auto none = make(linear(4, 6), torch::nn::Dropout(0.0), linear(6, 3));  // draws nothing
  require_causes({}, none, mean_loss, make_batch(12));
}

TEST_CASE("verify_accumulation: randomness is found even if micro-batches happen to draw the same numbers") {
  // One layer draws row by row, so the micro-batches' numbers in order are the whole batch's.
  auto model = make(linear(4, 6), torch::nn::Dropout(0.5));
  const Example batch(make_batch(12).data, torch::randn({12, 6}, at::kDouble));
  const auto report = require_causes({"1 (Dropout): draws random numbers"}, model, mean_loss, batch);
  CHECK(report.worst() < report.tolerance);
  CHECK(contains(to_string(report), "4 micro-batches and one batch: equal, but (tolerance"));
}

TEST_CASE("verify_accumulation: randomness in every mode is named, with other visible causes") {
  auto model = make(linear(4, 6), std::make_shared<Noise>(), linear(6, 3));
  require_causes({"random numbers are drawn in evaluation mode, too"}, model, mean_loss, make_batch(12));
  auto both =
      make(linear(4, 6), torch::nn::Dropout(0.5), std::make_shared<Noise>(), torch::nn::BatchNorm1d(6), linear(6, 3));
  require_causes({"in evaluation mode, too", "1 (Dropout): draws", "3 (BatchNorm1d): computes"}, both, mean_loss,
                 make_batch(12));
}

TEST_CASE("verify_accumulation: unequal rows, and their mean weighted by rows") {
  auto model = make_model();
  const auto batch = make_batch(10);
  require_causes({"unequal ones (3, 3, 2, 2): return ga::Loss{mean, rows}"}, model, mean_loss, batch);
  const auto weighted = [](auto& net, const auto& part) { return ga::Loss{mean_loss(net, part), part.data.size(0)}; };
  require_causes({}, model, weighted, batch);
  require_causes({}, model, weighted, batch, {.steps = 10});
  const auto wrong = [](auto& net, const auto& part) { return ga::Loss{mean_loss(net, part), 20 - part.data.size(0)}; };
  require_causes({"unequal ones (3, 3, 2, 2)"}, model, wrong, batch);
}

TEST_CASE("verify_accumulation: a mean over valid tokens, without and with their count") {
  auto model = make_model();
  const auto batch = token_batch();
  const auto report = require_causes({"the loss is a mean over items"}, model, token_loss, batch, {.steps = 4});
  CHECK(contains(report.causes[0], "(0.15, 0.35, 0.15, 0.35)"));  // 3, 7, 3 and 7 of 20
  CHECK(contains(report.causes[0], "return ga::Loss{mean, items}"));
  const auto counted = [](auto& net, const auto& part) {
    return ga::Loss{token_loss(net, part), part.target.ne(-100).sum().template item<std::int64_t>()};
  };
  require_causes({}, model, counted, batch);
  const auto miscounted = [](auto& net, const auto& part) {
    return ga::Loss{token_loss(net, part), part.target.numel()};
  };
  require_causes({"(0.15, 0.35, 0.15, 0.35)"}, model, miscounted, batch);
}

TEST_CASE("verify_accumulation: a micro-batch without a valid token") {
  auto model = make_model();
  const auto batch = token_batch();
  batch.target.slice(0, 2, 4).fill_(-100);  // its mean is 0 / 0
  const auto report = require_causes({"the loss is a mean over items"}, model, token_loss, batch);
  CHECK(contains(report.causes[0], "(0.231, 0, 0.231, 0.538)"));
  CHECK(contains(report.causes[0], "the loss of number 1 is not finite"));
  const auto counted = [](auto& net, const auto& part) {
    return ga::Loss{token_loss(net, part), part.target.ne(-100).sum().template item<std::int64_t>()};
  };
  require_causes({}, model, counted, batch);

  // cross_entropy makes the gradient of such a mean 0; this objective makes it NaN.
  const auto masked = [](auto& net, const auto& part) {
    const auto valid = part.target.ne(-100);
    return (net->forward(part.data).square().mean(-1) * valid).sum() / valid.sum();
  };
  CHECK(std::isinf(require_causes({"(0.231, 0, 0.231, 0.538)"}, model, masked, batch).worst()));
}

TEST_CASE("verify_accumulation: a sum is distinguished from a mean, and from a loss that couples its samples") {
  auto model = make_model();
  const auto sum = [](auto& net, const auto& part) { return mean_loss(net, part) * part.data.size(0); };
  const auto report =
      require_causes({"the loss is a sum, not a mean: the whole batch has 4 times"}, model, sum, make_batch(12));
  CHECK(report.worst() == Approx(0.75));  // a quarter instead of the whole
  require_causes({"the loss is a sum"}, model, sum, make_batch(10));
  require_causes({"no sum of the micro-batches' gradients is the whole batch's"}, model, contrastive_loss,
                 make_batch(12));
}

TEST_CASE("verify_accumulation: several causes are all named") {
  auto model =
      make(linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.5), std::make_shared<Centre>(), linear(6, 3));
  require_causes(
      {"1 (BatchNorm1d): computes", "2 (Dropout): draws", "3 (Centre): computes", "unequal ones (3, 3, 2, 2)"}, model,
      mean_loss, make_batch(10));
  const auto sum = [](auto& net, const auto& part) { return mean_loss(net, part) * part.data.size(0); };
  require_causes({"1 (BatchNorm1d): computes", "2 (Dropout): draws", "3 (Centre): computes", "is a sum"}, model, sum,
                 make_batch(12));
  auto contrastive = make(linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.5), linear(6, 3));
  require_causes({"1 (BatchNorm1d)", "2 (Dropout): draws", "no sum of the micro-batches'"}, contrastive,
                 contrastive_loss, make_batch(12));
}

TEST_CASE("verify_accumulation: one sentence for many modules") {
  torch::manual_seed(1);
  Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(torch::nn::Linear(4, 4));
    model->push_back(torch::nn::BatchNorm1d(4));
  }
  model->to(at::kDouble);
  const Example batch(make_batch(12).data, torch::randn({12, 4}, at::kDouble));
  const auto report = require_causes({"11 (BatchNorm1d) and 2 more: computes"}, model, mean_loss, batch);
  CHECK(contains(report.causes[0], "1 (BatchNorm1d), 3 (BatchNorm1d), "));
}

TEST_CASE("verify_accumulation: an objective that is not a function of model and batch") {
  auto model = make_model();
  const auto drifting = [step = 0](auto& net, const auto& part) mutable { return mean_loss(net, part) * ++step; };
  require_causes({"the same batch gives other gradients each time"}, model, drifting, make_batch(12));
}

TEST_CASE("verify_accumulation: state outside of buffers is found: a running maximum, a carried hidden state") {
  const std::string each_time = "a running maximum or a hidden state that no buffer holds";
  auto maximum = make(linear(4, 6), std::make_shared<RunningMax>(), linear(6, 3));
  require_causes({each_time}, maximum, mean_loss, make_batch(12));
  torch::manual_seed(2);
  auto reader = std::make_shared<Reader>();
  const Example texts(torch::randn({12, 5, 4}, at::kDouble), torch::randn({12, 3}, at::kDouble));
  require_causes({each_time}, reader, mean_loss, texts);
  const auto fresh = [](auto& net, const auto& part) {
    net->h = at::Tensor();
    return mean_loss(net, part);
  };
  require_causes({}, reader, fresh, texts);
}

TEST_CASE("verify_accumulation: a running baseline in a buffer is named, unless the loss does not depend on it") {
  auto model = make(linear(4, 6), std::make_shared<Baseline>(), linear(6, 3));
  const auto loss = [](auto& net, const auto& part) {
    const auto reward = part.target.mean(1);
    const auto advantage = reward - net[1]->template as<Baseline>()->update(reward.mean());
    return -(advantage * net->forward(part.data).log_softmax(1).select(1, 0)).mean();
  };
  require_causes({"1 (Baseline): changes its buffers in evaluation mode, too, as a running baseline does"}, model, loss,
                 make_batch(12));
  auto counting = make(linear(4, 6), std::make_shared<Baseline>(), linear(6, 3));
  const auto tokens = [](auto& net, const auto& part) {
    net[1]->template as<Baseline>()->update(part.data.mean());
    return token_loss(net, part);
  };
  require_causes({"the loss is a mean over items"}, counting, tokens, token_batch());
  const auto unused = [](auto& net, const auto& part) {
    net[1]->template as<Baseline>()->update(part.target.mean());
    return mean_loss(net, part);
  };
  require_causes({}, model, unused, make_batch(12));
}

TEST_CASE("verify_accumulation: a root or a logarithm of a mean is not a mean, also if micro-batches are alike") {
  for (auto dtype : {at::kDouble, at::kFloat})
    for (std::int64_t rows : {12, 10, 400}) {
      auto model = make_model(dtype);
      const auto root = [](auto& net, const auto& part) { return mean_loss(net, part).sqrt(); };
      const auto report = require_causes({"the loss is no mean over items"}, model, root, make_batch(rows, dtype));
      CHECK(has_cause(report, "as of a root or a logarithm of a mean (RMSE)"));
      const auto logarithm = [](auto& net, const auto& part) { return mean_loss(net, part).log(); };
      require_causes({"the loss is no mean over items"}, model, logarithm, make_batch(rows, dtype));
    }
  auto model = make_model(at::kFloat);  // a mean over tokens is distinguished from them in float32, too
  const auto batch = token_batch();
  require_causes({"(0.15, 0.35, 0.15, 0.35), as valid tokens are"}, model, token_loss,
                 Example(batch.data.to(at::kFloat), batch.target));
}

TEST_CASE("verify_accumulation: a sum with a term without samples, such as a penalty on weights") {
  auto model = make_model();
  const auto penalty = [](auto& net) { return 0.1 * net->template at<torch::nn::LinearImpl>(0).weight.square().sum(); };
  const auto sum = [&](auto& net, const auto& part) {
    return torch::mse_loss(net->forward(part.data), part.target, at::Reduction::Sum) + penalty(net);
  };
  for (std::int64_t steps : {2, 3, 4})
    require_causes({"the loss is a sum, and a term that is no sum over samples"}, model, sum, make_batch(10),
                   {.steps = steps});
  const auto mean = [&](auto& net, const auto& part) { return mean_loss(net, part) + penalty(net); };
  require_causes({}, model, mean, make_batch(12));

  // A network that solves u' = -u, u(0) = 1: the residual at its points, and the boundary.
  auto solution = make(linear(1, 8), torch::nn::Tanh(), linear(8, 1));
  const auto physics = [](bool is_mean) {
    return [is_mean](auto& net, const at::Tensor& points) {
      const auto t = points.detach().requires_grad_();
      const auto u = net->forward(t);
      const auto slope = torch::autograd::grad({u.sum()}, {t}, {}, {}, /*create_graph=*/true)[0];
      const auto lacks = (slope + u).square();
      return (is_mean ? lacks.mean() : lacks.sum()) + (net->forward(torch::zeros({1, 1}, at::kDouble)) - 1).square();
    };
  };
  const auto points = torch::rand({12, 1}, at::kDouble);
  require_causes({}, solution, physics(true), points);
  require_causes({"the loss is a sum, and a term that is no sum over samples"}, solution, physics(false), points);
}

TEST_CASE(
    "verify_accumulation: a small error of a loss that is not a mean is not reported as rounding, but rounding is") {
  torch::manual_seed(6);
  Sequential model(torch::nn::Conv2d(1, 4, 3), torch::nn::ReLU(), torch::nn::Conv2d(4, 1, 1));
  const auto images = torch::randn({16, 1, 10, 10});
  const Example batch(images, images.slice(2, 1, 9).slice(3, 1, 9).gt(0).to(at::kFloat));
  const auto report = require_causes({"no sum of the micro-batches' gradients"}, model, dice_loss, batch);
  CHECK(report.worst() < 0.05);
  CHECK(!has_cause(report, "rounding"));

  const auto in_16_bits = [](auto& net, const auto& part) {
    const ga::Autocast autocast(at::kCPU, at::kBFloat16);
    return torch::mse_loss(net->forward(part.data).to(at::kFloat), part.target);
  };
  const auto rounded = require_causes({"is rounding (autocast, TF32)"}, model, in_16_bits, batch);
  CHECK(rounded.worst() < 0.05);
  require_causes({}, model, in_16_bits, batch, {.steps = 4, .tolerance = 2e-2});
}

TEST_CASE("verify_accumulation: an error that grows with the weights is not reported as rounding") {
  auto model = make(linear(8, 1));
  auto& weight = model->at<torch::nn::LinearImpl>(0).weight;
  const auto direction = weight.detach() / weight.detach().square().sum();
  const auto coupled = [&](auto& net, const auto& part) {
    const auto size = (net->template at<torch::nn::LinearImpl>(0).weight * direction).sum();  // 1 at first
    return mean_loss(net, part) + 1e-4 * torch::exp(64 * (size - 1)) * net->forward(part.data).mean().square();
  };
  const Example batch(torch::randn({12, 8}, at::kDouble), torch::randn({12, 1}, at::kDouble));
  const auto report = require_causes({"no sum of the micro-batches' gradients"}, model, coupled, batch);
  CHECK(report.worst() < 0.05);
}

TEST_CASE("verify_accumulation: a split function for only one number of parts gives the same report") {
  auto model = make_model();
  const auto batch = make_batch(12);
  const auto split = [](const Example& whole, std::int64_t steps) {
    TORCH_CHECK(steps == 4, "only by four");
    std::vector<Example> parts;
    for (std::int64_t row = 0; row < 12; row += 3)
      parts.emplace_back(whole.data.slice(0, row, row + 3), whole.target.slice(0, row, row + 3));
    return parts;
  };
  const auto report = ga::verify_accumulation(model, contrastive_loss, batch, {.steps = 4}, split);
  REQUIRE(report.causes.size() == 1);
  CHECK(contains(report.causes.front(), "no sum of the micro-batches' gradients is the whole batch's"));
}

TEST_CASE("verify_accumulation: if the loss is a root of a mean, no module is named for it") {
  struct Doubles : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return is_training() ? 2 * x : x; }
  };
  auto model = make(linear(4, 6), std::make_shared<Doubles>(), linear(6, 3));
  const auto root = [](auto& net, const auto& part) { return mean_loss(net, part).sqrt(); };
  require_causes({"the loss is no mean over items"}, model, root, make_batch(12));
}

TEST_CASE("verify_accumulation: gradients that prove nothing") {
  auto model = make_model();
  const auto nothing = [](auto& net, const auto& part) { return mean_loss(net, part) * 0; };
  require_causes({"are 0: there is nothing to compare"}, model, nothing, make_batch(12));
  const auto infinite = [](auto& net, const auto& part) { return mean_loss(net, part) / 0; };
  const auto report = require_causes({"are not finite: there is nothing to compare"}, model, infinite, make_batch(12));
  CHECK(std::isinf(report.worst()));
  CHECK(!report.exact());
}

TEST_CASE("verify_accumulation: frozen, unused, shared and sparse parameters") {
  struct Net : torch::nn::Module {
    Net() {
      torch::manual_seed(2);
      words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 4).sparse(true)));
      again = register_module("again", words.ptr());
      frozen = register_module("frozen", torch::nn::Linear(4, 4));
      last = register_module("last", torch::nn::Linear(4, 2));
      unused = register_module("unused", torch::nn::Linear(4, 2));
      frozen->weight.set_requires_grad(false);
      to(at::kDouble);
    }
    at::Tensor forward(const at::Tensor& x) { return last->forward(frozen->forward(words->forward(x))); }
    torch::nn::Embedding words{nullptr};
    std::shared_ptr<torch::nn::Module> again;
    torch::nn::Linear frozen{nullptr}, last{nullptr}, unused{nullptr};
  };
  auto model = std::make_shared<Net>();
  const Example batch(torch::arange(12) % 7, torch::ones({12, 2}, at::kDouble));
  const auto report = require_causes({}, model, mean_loss, batch);
  std::vector<std::string> names;
  for (auto& parameter : report.parameters) names.push_back(parameter.name);
  CHECK(names == std::vector<std::string>{"words.weight", "frozen.bias", "last.weight", "last.bias", "unused.weight",
                                          "unused.bias"});
  CHECK(report.parameters[4].relative_error == 0);
}

TEST_CASE("verify_accumulation: a gradient of 0 up to rounding is no error, in float32") {
  torch::manual_seed(3);
  // Softmax is invariant to a constant in all scores.
  struct Net : torch::nn::Module {
    Net() : shift(register_parameter("shift", torch::zeros({1}))), last(register_module("last", linear(4, 3))) {}
    at::Tensor forward(const at::Tensor& x) { return last->forward(x) + shift; }
    at::Tensor shift;
    torch::nn::Linear last;
  };
  auto model = std::make_shared<Net>();
  const Example batch(torch::randn({64, 4}), torch::randint(3, {64}));
  const auto loss = [](auto& net, const auto& part) {
    return torch::cross_entropy_loss(net->forward(part.data), part.target);
  };
  require_causes({}, model, loss, batch);
}

TEST_CASE("verify_accumulation: 16-bit models") {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    auto model = make_model(dtype);
    const auto batch = make_batch(12, dtype);
    const auto loss = [](auto& net, const auto& part) {
      return torch::mse_loss(net->forward(part.data).to(at::kFloat), part.target.to(at::kFloat));
    };
    require_causes({}, model, loss, batch);
    const auto sum = [&](auto& net, const auto& part) { return loss(net, part) * part.data.size(0); };
    require_causes({"is a sum"}, model, sum, batch);
  }
}

TEST_CASE("verify_accumulation: a given tolerance is used") {
  auto model = make(linear(4, 6), torch::nn::BatchNorm1d(6), linear(6, 3));
  CHECK(ga::verify_accumulation(model, mean_loss, make_batch(12), {.steps = 4, .tolerance = 1e9}).exact());
  auto clean = make_model(at::kFloat);
  CHECK(!ga::verify_accumulation(clean, mean_loss, make_batch(12, at::kFloat), {.steps = 4, .tolerance = 0}).exact());
}

TEST_CASE("verify_accumulation: batches of every kind that it can split") {
  auto model = make_model();
  const auto batch = make_batch(12);
  require_causes({}, model, mean_loss, ga::data::Batch{batch.data, batch.target});
  require_causes(
      {}, model, [](auto& net, const at::Tensor& x) { return net->forward(x).square().mean(); }, batch.data);
  const auto of_two = [](auto& net, const auto& part) {
    return torch::mse_loss(net->forward(std::get<0>(part)), std::get<1>(part));
  };
  require_causes({}, model, of_two, std::make_pair(batch.data, batch.target));
  require_causes({}, model, of_two, std::make_tuple(batch.data, batch.target, batch.data));
  const auto named = [](auto& net, const auto& part) {
    return torch::mse_loss(net->forward(part.at("x")), part.at("y"));
  };
  std::map<std::string, at::Tensor> names{{"x", batch.data}, {"y", batch.target}};
  require_causes({}, model, named, names);
  std::vector<Example> examples;
  for (std::int64_t i = 0; i < 12; ++i) examples.emplace_back(batch.data[i], batch.target[i]);
  const auto of_list = [](auto& net, const std::vector<Example>& part) {
    at::Tensor loss = torch::zeros({}, at::kDouble);
    for (auto& example : part) loss = loss + mean_loss(net, example) / static_cast<double>(part.size());
    return loss;
  };
  require_causes({}, model, of_list, examples);

  // Rows are the first dimension of each.
  for (auto& [name, tensor] : names) tensor = tensor.slice(0, 2);
  require_causes({"(3, 3, 2, 2)"}, model, named, names);
  require_causes({"(3, 3, 2, 2)"}, model, of_two, std::make_pair(batch.data.slice(0, 2), batch.target.slice(0, 2)));
  examples.resize(10);
  require_causes({"(3, 3, 2, 2)"}, model, of_list, examples);
}

TEST_CASE("verify_accumulation: batches of sequences, with their counts") {
  torch::manual_seed(4);
  std::vector<at::Tensor> texts, labels;
  for (std::int64_t length : {9, 7, 7, 6, 4, 4, 2, 1}) {
    texts.push_back(torch::randn({length, 4}, at::kDouble));
    labels.push_back(torch::randint(3, {length}));
  }
  ga::data::LengthBuckets buckets(texts, labels, {.batch_size = 8});
  auto model = make_model();
  const auto batch = *buckets.begin();
  const auto counted = [](auto& net, const auto& part) { return ga::Loss{token_loss(net, part), part.tokens}; };
  require_causes({}, model, counted, batch);
  require_causes({"(0.4, 0.325, 0.2, 0.075)"}, model, token_loss, batch);
}

TEST_CASE("verify_accumulation: any other batch, by a function that splits it") {
  struct Pages {
    std::vector<at::Tensor> lines;
    std::string title;
  };
  auto model = make_model();
  const auto data = make_batch(12).data;
  const auto loss = [](auto& net, const Pages& pages) { return net->forward(torch::cat(pages.lines)).square().mean(); };
  const auto split = [](const Pages& pages, std::int64_t steps) {
    std::vector<Pages> parts;
    for (auto& lines : torch::cat(pages.lines).tensor_split(steps)) parts.push_back({{lines}, pages.title});
    return parts;
  };
  const ga::VerifyAccumulationOptions options{.steps = 4};
  CHECK(ga::verify_accumulation(model, loss, Pages{{data.slice(0, 0, 5), data.slice(0, 5)}, "a"}, options, split)
            .exact());
  const auto report = ga::verify_accumulation(model, loss, Pages{{data.slice(0, 0, 10)}, "a"}, options, split);
  CHECK(has_cause(report, "unequal shares of (0.3, 0.3, 0.2, 0.2)"));  // without a count of rows
  CHECK(report.causes.size() == 1);
  const auto too_few = [&](const Pages& pages, std::int64_t) { return split(pages, 3); };
  REQUIRE_ERROR("split must return steps = 4 micro-batches, got 3",
                ga::verify_accumulation(model, loss, Pages{{data}, "a"}, options, too_few));
}

TEST_CASE("verify_accumulation: a holder, a shared pointer, and a module on the stack") {
  struct Net : torch::nn::Module {
    Net() : norm(register_module("norm", torch::nn::BatchNorm1d(4))) { to(at::kDouble); }
    at::Tensor forward(const at::Tensor& x) { return norm->forward(x); }
    torch::nn::BatchNorm1d norm;
  };
  const auto data = make_batch(12).data;
  Net on_stack;
  const auto of_reference = [](Net& net, const at::Tensor& x) { return net.forward(x).pow(3).mean(); };
  CHECK(has_cause(ga::verify_accumulation(on_stack, of_reference, data, {.steps = 4}), "norm (BatchNorm1d)"));
  auto shared = std::make_shared<Net>();
  const auto of_pointer = [](std::shared_ptr<Net> net, const at::Tensor& x) { return net->forward(x).pow(3).mean(); };
  require_causes({"norm (BatchNorm1d)"}, shared, of_pointer, data);

  struct Own : torch::nn::Module {  // drops in its forward
    Own() : last(register_module("last", linear(4, 3))) { to(at::kDouble); }
    at::Tensor forward(const at::Tensor& x) { return last->forward(torch::dropout(x, 0.5, is_training())); }
    torch::nn::Linear last;
  };
  auto own = std::make_shared<Own>();
  require_causes({"the model itself (Own): draws"}, own, mean_loss, make_batch(12));
}

TEST_CASE("verify_accumulation: does not change gradients, modes, buffers and random numbers, also when it throws") {
  auto model = make(linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.5), linear(6, 3));
  mean_loss(model, make_batch(6)).backward();
  model[3]->as<torch::nn::Linear>()->bias.mutable_grad().reset();
  model[2]->as<torch::nn::Dropout>()->eval();
  const auto batch = make_batch(10);
  torch::manual_seed(8);
  torch::rand({3});
  const Fingerprint before(*model);
  int calls = 0;
  const auto counting = [&](auto& net, const auto& part) {
    ++calls;
    return mean_loss(net, part);
  };
  REQUIRE(ga::verify_accumulation(model, counting, batch, {.steps = 4}).causes.size() == 2);
  REQUIRE(changes(before, *model) == "");
  const int all = calls;
  REQUIRE(all > 20);
  int thrown = 0, reported = 0;
  for (int fails = 1; fails <= all; ++fails) {
    calls = 0;
    const auto failing = [&](auto& net, const auto& part) {
      auto loss = mean_loss(net, part);
      TORCH_CHECK(++calls != fails, "call number ", fails);
      return loss;
    };
    try {
      const auto report = ga::verify_accumulation(model, failing, batch, {.steps = 4});
      reported += has_cause(report, "the search ended early, with the model in evaluation mode: call number ");
    } catch (const c10::Error&) {
      ++thrown;
    }
    INFO("call " << fails << " of " << all);
    REQUIRE(changes(before, *model) == "");
  }
  CHECK(thrown == 6);  // whole batch, micro-batches, whole batch with other random numbers
  CHECK(thrown + reported == all);
}

TEST_CASE("verify_accumulation: restores parameters that an objective writes to, and keeps a user's graph usable") {
  auto model = make_model();
  const auto loss = mean_loss(model, make_batch(3));
  const auto writing = [](auto& net, const auto& part) {
    auto value = mean_loss(net, part);
    at::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(9);
    net->zero_grad();
    return value;
  };
  const auto batch = make_batch(12);
  const Fingerprint before(*model);
  testing::error_of([&] { ga::verify_accumulation(model, writing, batch, {.steps = 4}); });
  CHECK(changes(before, *model) == "");
  auto clean = make_model();
  const auto pending = mean_loss(clean, make_batch(3));
  ga::verify_accumulation(clean, mean_loss, make_batch(12), {.steps = 4});
  CHECK_NOTHROW(pending.backward());  // its saved tensors were not written to
}

TEST_CASE("verify_accumulation: works with gradients disabled, and leaves them disabled") {
  at::NoGradGuard no_grad;
  auto model = make_model();
  require_causes({}, model, mean_loss, make_batch(12));
  CHECK(!at::GradMode::is_enabled());
}

TEST_CASE("verify_accumulation: a model that cannot run in evaluation mode is reported") {
  struct Net : torch::nn::Module {
    Net() : norm(register_module("norm", torch::nn::BatchNorm1d(4))) { to(at::kDouble); }
    at::Tensor forward(const at::Tensor& x) {
      TORCH_CHECK(is_training(), "only for training");
      return norm->forward(x);
    }
    torch::nn::BatchNorm1d norm;
  };
  auto model = std::make_shared<Net>();
  const auto loss = [](auto& net, const at::Tensor& x) { return net->forward(x).pow(3).mean(); };
  const auto report = require_causes({"the search ended early, with the model in evaluation mode: only for training"},
                                     model, loss, make_batch(12).data);
  CHECK(report.worst() > 1e-3);
}

TEST_CASE("verify_accumulation: refuses invalid arguments") {
  auto model = make_model();
  const auto batch = make_batch(12);
  const auto verify = [&](auto objective, ga::VerifyAccumulationOptions options = {}) {
    return ga::verify_accumulation(model, objective, batch, options);
  };
  REQUIRE_ERROR("steps must be >= 2, got 1", verify(mean_loss, {.steps = 1}));
  REQUIRE_ERROR("must have a row for each of 13 micro-batches, got 12", verify(mean_loss, {.steps = 13}));
  REQUIRE_ERROR("tolerance must be >= 0, got -1", verify(mean_loss, {.tolerance = -1}));
  REQUIRE_ERROR("tolerance must be >= 0, got nan", verify(mean_loss, {.tolerance = std::nan("")}));
  REQUIRE_ERROR("got an undefined tensor", verify([](auto&, const auto&) { return at::Tensor(); }));
  REQUIRE_ERROR("must have one element, got shape [2, 3]",
                verify([](auto& net, const auto& part) { return net->forward(part.data); }));
  REQUIRE_ERROR("must require grad", verify([](auto&, const auto& part) { return part.data.mean(); }));
  REQUIRE_ERROR("items must be finite and >= 0, got -1", verify([](auto& net, const auto& part) {
                  return ga::Loss{mean_loss(net, part), -1};
                }));
  REQUIRE_ERROR("must have the same number of rows",
                ga::verify_accumulation(model, mean_loss, Example(batch.data, batch.target.slice(0, 1))));
  REQUIRE_ERROR("must have a tensor, got none",
                ga::verify_accumulation(
                    model, [](auto&, auto&) { return at::Tensor(); }, std::map<std::string, at::Tensor>()));
  REQUIRE_ERROR("must have a first dimension, its rows, got",
                ga::verify_accumulation(model, mean_loss, Example(batch.data, at::Tensor())));
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
  REQUIRE_ERROR("a parameter of the model must require grad, but none does", verify(mean_loss));
}

TEST_CASE("verify_accumulation: prints the worst parameters first, and the causes") {
  auto model = make(linear(4, 6), torch::nn::BatchNorm1d(6), linear(6, 3));
  std::ostringstream stream;
  stream << require_causes({"BatchNorm1d"}, model, mean_loss, make_batch(12));
  const auto text = stream.str();
  INFO(text);
  CHECK(
      text.starts_with("4 micro-batches and one batch: NOT EQUAL (tolerance 1.0e-10)\n  relative error  parameter\n"));
  CHECK(contains(text, "  and 1 more with smaller errors\n  * 1 (BatchNorm1d): computes"));
  std::vector<double> errors;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (contains(line, "e-") && contains(line, "   ")) errors.push_back(std::stod(line));
  CHECK(errors.size() == 5);
  CHECK(std::is_sorted(errors.rbegin(), errors.rend()));
}

TEST_CASE("verify_accumulation: on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  auto model = make(linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.5), linear(6, 3));
  model->to(at::kCUDA);
  const auto batch = make_batch(10);
  const Example there(batch.data.cuda(), batch.target.cuda());
  const auto& generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, 0));
  const auto random_state = generator.get_state();
  require_causes({"1 (BatchNorm1d): computes", "2 (Dropout): draws", "unequal ones (3, 3, 2, 2)"}, model, mean_loss,
                 there);
  CHECK(generator.get_state().equal(random_state));
  auto clean = make_model();
  clean->to(at::kCUDA);
  const Example even(there.data.slice(0, 0, 8), there.target.slice(0, 0, 8));
  require_causes({}, clean, mean_loss, even);
}

TEST_CASE("verify_accumulation: a batch that carries a graph is an error with advice to detach it") {
  auto model = make(linear(4, 3));
  auto batch = make_batch(8);
  const auto weight = torch::ones({1}, at::kDouble).requires_grad_();
  batch.data = (batch.data * weight).sin();
  REQUIRE_ERROR("detach() its tensors", ga::verify_accumulation(model, mean_loss, batch, {.steps = 2}));
  batch.data = batch.data.detach();
  CHECK(ga::verify_accumulation(model, mean_loss, batch, {.steps = 2}).exact());
}
