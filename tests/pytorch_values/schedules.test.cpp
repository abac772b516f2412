// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/learning_rates.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/policies/schedule.hpp>

#include "support/waves.hpp"

#include "pytorch_values/schedules.hpp"

#include <functional>
#include <limits>

// The schedulers and averages of schedules.py, compared with the results of Python's PyTorch.

namespace ga = gradaccum;
using pytorch_values::peak;

namespace {

using Rate = std::function<double(std::int64_t)>;

const std::map<std::string, Rate> ours = {
    {"LinearLR_up", ga::lr::Constant{.peak = peak, .warmup = 20, .start = 0.1 * peak}},
    {"LinearLR_down", ga::lr::Linear{.peak = peak, .total = 30, .end = 0.25 * peak}},
    {"CosineAnnealingLR", ga::lr::Cosine{.peak = peak, .total = 40, .end = 1e-4}},
    {"CosineAnnealingLR_to_0", ga::lr::Cosine{.peak = peak, .total = 40}},
    {"SequentialLR", ga::lr::Cosine{.peak = peak, .warmup = 10, .total = 50, .end = 1e-5, .start = 0.01 * peak}},
    {"ConstantLR", [](std::int64_t update) { return update < 5 ? 0.25 * peak : peak; }},
    {"StepLR", [](std::int64_t update) { return peak * std::pow(0.5, update / 4); }},
    {"ExponentialLR", [](std::int64_t update) { return peak * std::pow(0.9, update); }},
    {"transformers_constant", ga::lr::Constant{.peak = peak, .warmup = 10, .start = 0}},
    {"transformers_linear", ga::lr::Linear{.peak = peak, .warmup = 10, .total = 50, .start = 0}},
    {"transformers_cosine", ga::lr::Cosine{.peak = peak, .warmup = 10, .total = 50, .start = 0}},
    {"transformers_cosine_with_min_lr",
     ga::lr::Cosine{.peak = peak, .warmup = 10, .total = 50, .end = 0.1 * peak, .start = 0}},
    {"transformers_cosine_warmup_with_min_lr",
     ga::lr::Cosine{.peak = peak, .warmup = 9, .total = 49, .end = 0.1 * peak}},
    {"transformers_wsd_linear",
     ga::lr::WarmupStableDecay{peak, 10, 50, 15, 0.1 * peak, 0.1 * peak, ga::lr::Decay::linear}},
    {"transformers_wsd_cosine", ga::lr::WarmupStableDecay{peak, 10, 50, 15, 0.1 * peak, 0.1 * peak}},
    {"transformers_wsd_one_minus_sqrt",
     ga::lr::WarmupStableDecay{peak, 10, 50, 15, 0.1 * peak, 0.1 * peak, ga::lr::Decay::one_minus_sqrt}},
    {"no_warmup", ga::lr::Cosine{.peak = peak, .total = 20}},
    {"one_update", ga::lr::Linear{.peak = peak, .total = 1}},
    {"all_warmup", ga::lr::Linear{.peak = peak, .warmup = 20, .total = 20, .start = 0}},
    {"long_cosine", ga::lr::Cosine{.peak = peak, .warmup = 100, .total = 5000, .start = 0}},
    {"long_linear", ga::lr::Linear{.peak = peak, .warmup = 100, .total = 5000, .start = 0}},
};

/// Returns the largest relative difference; 0 if both are zero.
double error_of(const Rate& rate, const pytorch_values::Rates& expected) {
  double largest = 0;
  for (std::size_t i = 0; i < expected.rates.size(); ++i) {
    const auto update = expected.updates.empty() ? static_cast<std::int64_t>(i) : expected.updates.at(i);
    const double found = rate(update), wanted = expected.rates[i];
    if (found != wanted) largest = std::max(largest, std::abs(found - wanted) / std::max(found, wanted));
  }
  return largest;
}

struct Net : torch::nn::Module {
  torch::nn::Linear first{2, 3}, last{3, 1};
  torch::nn::BatchNorm1d norm{3};
  Net() {
    register_module("0", first);
    register_module("1", norm);
    register_module("2", last);
    to(at::kDouble);
  }
};

std::vector<at::Tensor> floating(const torch::nn::Module& module) {
  std::vector<at::Tensor> all = module.parameters();
  for (auto& buffer : module.buffers())
    if (buffer.dim() > 0) all.push_back(buffer);  // without the count of batches, which to(kDouble) converts
  return all;
}

std::vector<double> values_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (auto& tensor : floating(module)) all.push_back(tensor.detach().flatten());
  const auto values = torch::cat(all);
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

/// Returns our averages in the form of `expected.values`.
std::vector<std::vector<double>> averages_of(const pytorch_values::Averages& expected, double decay) {
  at::NoGradGuard no_grad;
  Net net;
  ga::Ema::Running ema({.decay = decay, .warmup = expected.warmup, .buffers = expected.buffers});
  std::vector<std::vector<double>> all;
  for (int update = 0; update < pytorch_values::average_updates; ++update) {
    std::int64_t start = 100 * update;
    for (auto& tensor : floating(net)) {
      const auto values = testing::waves(tensor.sizes(), start);
      tensor.copy_(expected.eighths ? (values * 8).round() / 8 : values);
      start += tensor.numel();
    }
    ema.update(net);
    ema.swap(net);
    all.push_back(values_of(net));
    ema.swap(net);
  }
  return all;
}

double largest_difference(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < b.size(); ++i)
    for (std::size_t j = 0; j < b[i].size(); ++j) largest = std::max(largest, std::abs(a.at(i).at(j) - b[i][j]));
  return largest;
}

}  // namespace

TEST_CASE("PyTorch's values: learning rates") {
  for (auto& [name, expected] : pytorch_values::schedules) {
    INFO(name);
    CHECK(error_of(ours.at(name), expected) < 1e-12);
  }
  CHECK(ours.size() == pytorch_values::schedules.size());
}

TEST_CASE("PyTorch's values: the tables of schedules differ") {
  const auto& all = pytorch_values::schedules;
  CHECK(error_of(ours.at("CosineAnnealingLR"), all.at("CosineAnnealingLR_to_0")) > 1e-3);
  CHECK(error_of(ours.at("transformers_linear"), all.at("transformers_cosine")) > 1e-3);
  const ga::lr::Cosine one_late{.peak = peak, .warmup = 10, .total = 51, .start = 0};
  CHECK(error_of(one_late, all.at("transformers_cosine")) > 1e-3);
  const ga::lr::Constant own_start{.peak = peak, .warmup = 10};
  CHECK(error_of(own_start, all.at("transformers_constant")) > 1e-3);
}

TEST_CASE("PyTorch's values: ReduceLROnPlateau") {
  using Plateau = ga::ReduceLROnPlateau;
  const std::map<std::string, Plateau> all = {
      {"defaults", {}},
      {"patience_0", {.factor = 0.5, .patience = 0}},
      {"patience_2", {.factor = 0.5, .patience = 2}},
      {"max", {.mode = ga::Mode::max, .factor = 0.3, .patience = 1}},
      {"absolute", {.factor = 0.5, .patience = 1, .threshold = 0.05, .relative = false}},
      {"max_absolute", {.mode = ga::Mode::max, .factor = 0.5, .patience = 1, .threshold = 0.1, .relative = false}},
      {"threshold", {.factor = 0.5, .patience = 1, .threshold = 0.1}},
      {"threshold_0", {.factor = 0.5, .patience = 1, .threshold = 0}},
      {"cooldown", {.factor = 0.5, .patience = 1, .cooldown = 3}},
      {"min_lr", {.factor = 0.25, .patience = 0, .min_lr = 1e-4}},
      {"eps", {.factor = 0.5, .patience = 0, .eps = 1e-4}},
  };
  const auto rates_of = [](const Plateau& options) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    Plateau::Running plateau(options);
    torch::optim::SGD sgd({{{torch::zeros(1)}, std::make_unique<torch::optim::SGDOptions>(peak)},
                           {{torch::zeros(1)}, std::make_unique<torch::optim::SGDOptions>(peak / 10)}},
                          torch::optim::SGDOptions(peak));
    torch::optim::SGD another({torch::zeros(1)}, torch::optim::SGDOptions(peak));
    ga::LearningRates rates(sgd), others(another);
    std::vector<double> found;
    for (const double number : pytorch_values::watched) {
      plateau.step(number, rates);
      // Saves and loads in between, like a resumed training.
      ga::Archive saved;
      saved("plateau", plateau);
      Plateau::Running other(options);
      for (const double not_better : {17.0, nan, nan, nan}) other.step(not_better, others);  // other counts, too
      ga::Archive(saved.values())("plateau", other);
      plateau = other;
      for (auto& group : sgd.param_groups()) found.push_back(group.options().get_lr());
    }
    return found;
  };
  for (auto& [name, expected] : pytorch_values::plateaus) {
    INFO(name);
    CHECK(rates_of(all.at(name)) == expected);
    CHECK(rates_of(all.at(name == "threshold" ? "cooldown" : "threshold")) != expected);
  }
  CHECK(all.size() == pytorch_values::plateaus.size());
}

TEST_CASE("PyTorch's values: Ema's averages equal AveragedModel's") {
  for (auto& [name, expected] : pytorch_values::averages) {
    INFO(name);
    const auto found = averages_of(expected, expected.decay);
    CHECK(largest_difference(found, expected.values) < 1e-15);
    if (expected.eighths) CHECK(found == expected.values);
    CHECK(largest_difference(averages_of(expected, 0.9 * expected.decay), expected.values) > 1e-3);
  }
}
