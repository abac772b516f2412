// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/waves.hpp"

#include "pytorch_values/grad_scaler.hpp"

#include <limits>
#include <memory>
#include <vector>

// The loops of grad_scaler.py in C++, compared with Python's GradScaler. Scale and tracker must be equal, the float64
// parameters up to rounding. If the scale is not a power of two, that is float32's rounding, because Python multiplies
// by a float32 reciprocal.

namespace ga = gradaccum;
using testing::waves;

namespace {

using Trace = std::vector<std::vector<double>>;

constexpr int updates = 24;
const ga::AmpScalerOptions powers{.init_scale = 1024, .growth_interval = 3};
const ga::AmpScalerOptions odd{.init_scale = 1000, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 2};
const ga::AmpScalerOptions large{.init_scale = 1e38, .growth_factor = 1.9, .backoff_factor = 0.9, .growth_interval = 1};

struct Case {
  std::string name;
  ga::AmpScalerOptions options;
  int steps;
  double clip, momentum;
  int layers;
  // Relative and absolute, for the parameters.
  double tolerance() const { return options.growth_factor == 2 ? 1e-10 : 1e-6; }
  double margin() const { return options.growth_factor == 2 ? 0 : 2e-8; }
};
const std::vector<Case> cases{{"plain", powers, 1, 0, 0.9, 1},
                              {"plain_odd", odd, 1, 0, 0.9, 1},
                              {"plain_large", large, 1, 0, 0, 1},
                              {"clipped", powers, 1, 0.2, 0.9, 1},
                              {"clipped_odd", odd, 1, 0.2, 0, 1},
                              {"window", powers, 4, 0, 0.9, 1},
                              {"window_odd", odd, 3, 0, 0.9, 1},
                              {"window_clipped", powers, 4, 0.2, 0.9, 1},
                              {"window_clipped_odd", odd, 3, 0.2, 0.9, 1},
                              {"two_optimizers", powers, 1, 0, 0.9, 2},
                              {"two_optimizers_odd", odd, 1, 0.2, 0.9, 2},
                              {"two_optimizers_window", odd, 2, 0.2, 0.9, 2}};

template <class SGD>
struct Layer {
  at::Tensor weight, bias;
  SGD sgd;
  ga::GradAccumulator<SGD> optimizer;

  Layer(std::int64_t start, const Case& c, at::Device device)
      : weight((0.5 * waves({3, 4}, start)).to(device).set_requires_grad(true)),
        bias((0.5 * waves({3}, start + 12)).to(device).set_requires_grad(true)),
        sgd({weight, bias}, torch::optim::SGDOptions(0.05).momentum(c.momentum)),
        optimizer(sgd, {.steps = c.steps}) {}
};

// The ways to get the clipping of Python's loop.
enum class Clip { by_torch_after_unscale, by_the_accumulator };

template <class SGD, class Optimizer>
void step(ga::AmpScaler& scaler, Layer<SGD>& layer, Optimizer& optimizer, double clip, Clip how) {
  if constexpr (ga::accumulating<Optimizer>) {
    if (clip > 0 && how == Clip::by_the_accumulator) optimizer.clip_grad_norm_(clip);
    if (!optimizer.ready()) clip = 0;
  }
  if (clip > 0 && how == Clip::by_torch_after_unscale) {
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{layer.weight, layer.bias}, clip);
  }
  scaler.step(optimizer);
}

// Adds a term to the loss whose gradient is inf or NaN.
template <class SGD>
at::Tensor spoiled(const Layer<SGD>& first, const Layer<SGD>& last, int update, bool middle) {
  at::Tensor loss = torch::zeros({}, first.weight.options());
  if (update % 7 == 4 && middle) loss = loss + first.weight[0][1] * std::numeric_limits<double>::infinity();
  if (update == 11 || update == 12) loss = loss + last.bias[2] * std::numeric_limits<double>::quiet_NaN();
  return loss;
}

// Trains with accumulators, or (windows of one) with the optimizers.
template <class SGD = torch::optim::SGD>
Trace run(const Case& c, bool accumulators, Clip how, bool spoils = true, at::Device device = at::kCPU) {
  std::vector<std::unique_ptr<Layer<SGD>>> layers;
  for (int i = 0; i < c.layers; ++i) layers.push_back(std::make_unique<Layer<SGD>>(20 * i, c, device));
  ga::AmpScaler scaler(c.options);
  Trace trace;
  for (int micro_batch = 0; micro_batch < updates * c.steps; ++micro_batch) {
    const int update = micro_batch / c.steps, micro = micro_batch % c.steps;
    const auto x = waves({5, 4}, 100 + 20 * micro_batch).to(device);
    const auto y = waves({5, 3}, 700 + 15 * micro_batch).to(device);
    at::Tensor loss = torch::zeros({}, x.options());
    for (auto& l : layers) loss = loss + torch::mse_loss(torch::tanh(x.mm(l->weight.t()) + l->bias), y);
    if (spoils) loss = loss + spoiled(*layers.front(), *layers.back(), update, micro == c.steps / 2);
    scaler.scale(loss).backward();
    for (auto& l : layers) {
      const double clip = l == layers.front() ? c.clip : 0;
      accumulators ? step(scaler, *l, l->optimizer, clip, how) : step(scaler, *l, l->sgd, clip, how);
    }
    const double before = scaler.get_scale();
    scaler.update();
    for (auto& l : layers) accumulators ? l->optimizer.zero_grad() : l->sgd.zero_grad();
    if (micro + 1 < c.steps) CHECK(scaler.get_scale() == before);
    if (micro + 1 < c.steps) continue;
    auto& row = trace.emplace_back();
    row = {scaler.get_scale(), scaler.state_dict().at("_growth_tracker")};
    for (auto& l : layers)
      for (auto& number : {l->weight.square().sum() + l->bias.square().sum(), l->weight[0][0], l->bias[2]})
        row.push_back(number.template item<double>());
  }
  return trace;
}

void compare(const Case& c, const Trace& trace) {
  const auto& expected = pytorch_values::grad_scaler.at(c.name);
  REQUIRE(trace.size() == expected.size());
  for (std::size_t update = 0; update < expected.size(); ++update) {
    INFO(c.name << ", update " << update);
    REQUIRE(trace[update].size() == expected[update].size());
    REQUIRE(trace[update][0] == expected[update][0]);
    REQUIRE(trace[update][1] == expected[update][1]);
    for (std::size_t i = 2; i < expected[update].size(); ++i)
      CHECK(trace[update][i] == Approx(expected[update][i]).epsilon(c.tolerance()).margin(c.margin()));
  }
}

}  // namespace

TEST_CASE("PyTorch's values: GradScaler, with optimizers themselves") {
  for (auto& c : cases)
    if (c.steps == 1) compare(c, run(c, /*accumulators=*/false, Clip::by_torch_after_unscale));
}

TEST_CASE("PyTorch's values: GradScaler, with accumulators") {
  REQUIRE(pytorch_values::grad_scaler.size() == cases.size());
  for (auto& c : cases)
    for (auto how : {Clip::by_torch_after_unscale, Clip::by_the_accumulator}) compare(c, run(c, true, how));
}

TEST_CASE("PyTorch's values: GradScaler, on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  for (auto& c : cases)
    for (auto how : {Clip::by_torch_after_unscale, Clip::by_the_accumulator})
      compare(c, run(c, true, how, /*spoils=*/true, at::kCUDA));
}

TEST_CASE("PyTorch's values: GradScaler, where only the device knows of overflows", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  for (auto c : cases) {
    c.options.on_device = true;
    for (auto how : {Clip::by_torch_after_unscale, Clip::by_the_accumulator})
      compare(c, run<ga::optim::SGD>(c, true, how, /*spoils=*/true, at::kCUDA));
    if (c.steps == 1) compare(c, run<ga::optim::SGD>(c, false, Clip::by_torch_after_unscale, true, at::kCUDA));
    compare(c, run(c, true, Clip::by_the_accumulator, true, at::kCUDA));  // LibTorch's: the host reads it
  }
}

TEST_CASE("PyTorch's values: GradScaler's differ from a loop without overflows, and from one without clipping") {
  for (auto& c : cases) {
    const auto& expected = pytorch_values::grad_scaler.at(c.name).back();
    CHECK(run(c, true, Clip::by_the_accumulator, /*spoils=*/false).back()[0] != expected[0]);
    auto unclipped = c;
    unclipped.clip = 0;
    const auto trace = run(unclipped, true, Clip::by_the_accumulator).back();
    CHECK((std::abs(trace[2] - expected[2]) > 1e-4) == (c.clip > 0));
  }
}
