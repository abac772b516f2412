// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/models.hpp"
#include "support/waves.hpp"

#include "pytorch_values/accumulation.hpp"

#include <functional>
#include <memory>

// The loops of accumulation.py in C++, with the accumulator, compared with the results of Python's PyTorch.

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr int steps = 3;
constexpr double clip = 0.2;
const std::vector<std::int64_t> uneven{3, 5, 2, 6, 1, 4, 4, 7}, even(8, 4);

torch::nn::Sequential make_wave_model() {
  auto model = make_model();
  fill_with_waves(model, 0.5);
  return model;
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

template <class Optimizer, class Options>
Make maker(Options options) {
  return [=](std::vector<at::Tensor> parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

template <class SGD, class Adam, class AdamW>
std::map<std::string, Make> optimizers_of() {
  using namespace torch::optim;
  return {{"SGD", maker<SGD>(SGDOptions(0.1))},
          {"SGD_momentum", maker<SGD>(SGDOptions(0.1).momentum(0.9).weight_decay(0.01))},
          {"SGD_nesterov", maker<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true))},
          {"Adam", maker<Adam>(AdamOptions(0.01).weight_decay(0.01))},
          {"Adam_amsgrad", maker<Adam>(AdamOptions(0.01).amsgrad(true))},
          {"AdamW", maker<AdamW>(AdamWOptions(0.01).weight_decay(0.05))}};
}

std::map<std::string, Make> optimizers() {
  using namespace torch::optim;
  auto all = optimizers_of<SGD, Adam, AdamW>();
  all.emplace("RMSprop", maker<RMSprop>(RMSpropOptions(0.01).momentum(0.9)));
  all.emplace("Adagrad", maker<Adagrad>(AdagradOptions(0.05)));
  return all;
}

/// Returns our optimizers of the same names, which take the factor in their own pass.
std::map<std::string, Make> one_pass_optimizers() {
  return optimizers_of<ga::optim::SGD, ga::optim::Adam, ga::optim::AdamW>();
}

pytorch_values::Trace run(const Make& make, const std::vector<std::int64_t>& sizes, bool weighted) {
  auto model = make_wave_model();
  auto wrapped = make(model->parameters());
  ga::GradAccumulator optimizer(*wrapped, {.steps = steps});
  pytorch_values::Trace trace;
  const auto record = [&](bool moved) {
    if (!moved) return;
    const auto all = flat(model);
    trace.push_back({all.square().sum().item<double>(), all[0].item<double>(), all[-1].item<double>()});
  };
  std::int64_t rows = 0;
  for (auto size : sizes) {
    const Example batch(waves({size, 4}, 100 + 4 * rows), waves({size, 3}, 500 + 3 * rows));
    rows += size;
    if (weighted)
      optimizer.backward(ga::Loss{loss_of(model, batch), size});
    else
      loss_of(model, batch).backward();
    if (weighted) optimizer.clip_grad_norm_(clip);
    record(optimizer.step());
    optimizer.zero_grad();
  }
  record(optimizer.flush());
  return trace;
}

void compare(const std::map<std::string, Make>& all, const std::map<std::string, pytorch_values::Trace>& expected,
             const std::vector<std::int64_t>& sizes, bool weighted) {
  for (auto& [name, make] : all) {
    const auto& values = expected.at(name);
    const auto trace = run(make, sizes, weighted);
    REQUIRE(trace.size() == values.size());
    for (std::size_t update = 0; update < values.size(); ++update)
      for (int i = 0; i < 3; ++i) {
        INFO(name << ", update " << update << ", value " << i);
        CHECK(trace[update][i] == Approx(values[update][i]).epsilon(1e-10));
      }
  }
}

}  // namespace

TEST_CASE("PyTorch's values: equal micro-batches and a shorter last window") {
  REQUIRE(pytorch_values::even.size() == optimizers().size());
  compare(optimizers(), pytorch_values::even, even, false);
  compare(one_pass_optimizers(), pytorch_values::even, even, false);
}

TEST_CASE("PyTorch's values: uneven micro-batches, weighted and clipped") {
  compare(optimizers(), pytorch_values::uneven, uneven, true);
  compare(one_pass_optimizers(), pytorch_values::uneven, uneven, true);
}

TEST_CASE("PyTorch's values: weighted and unweighted windows give different values") {
  const auto trace = run(optimizers().at("SGD"), uneven, false);
  CHECK(std::abs(trace.back()[0] - pytorch_values::uneven.at("SGD").back()[0]) > 1e-4);
}
