// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/device_batches.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/leaves.hpp"
#include "support/run_kernel.hpp"
#include "support/take_on_device.hpp"

#include <ATen/Parallel.h>

#include <limits>
#include <sstream>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;
using torch::optim::SGDOptions;

namespace {

// The distance of bfloat16 numbers is 2^-7 above 1 and 2^-8 below.
at::Tensor ones(std::int64_t count) { return leaf(torch::ones({count}, at::kBFloat16)); }

at::Tensor gradient_like(const at::Tensor& parameter, int seed) {
  return torch::randn(parameter.sizes(), at::detail::createCPUGenerator(seed)).to(parameter.scalar_type());
}

// Makes steps of SGD by 2^-11, an eighth of the distance to the next number below 1.
at::Tensor after_small_steps(int steps, std::optional<std::uint64_t> seed, std::int64_t count = 1 << 16) {
  const auto parameter = ones(count);
  ga::optim::SGD sgd({parameter}, SGDOptions(std::ldexp(1.0, -11)));
  if (seed) sgd.stochastic_rounding(*seed);
  for (int i = 0; i < steps; ++i) {
    parameter.mutable_grad() = torch::ones({count}, at::kBFloat16);
    sgd.step();
  }
  return parameter.detach();
}

double mean_of(const at::Tensor& numbers) { return numbers.to(at::kDouble).mean().item<double>(); }

// Makes large and small parameters, several in a group.
Parameters parameters_of(at::ScalarType dtype) {
  Parameters parameters;
  for (auto size : {5000, 37, 4096, 1})
    parameters.push_back(leaf(torch::randn({size}, at::detail::createCPUGenerator(size)).to(dtype)));
  return parameters;
}

struct Kind {
  std::string name;
  std::function<std::shared_ptr<torch::optim::Optimizer>(Parameters, std::optional<std::uint64_t> seed)> make;
};
template <class Optimizer, class Options>
Kind kind(const std::string& name, Options options) {
  return {name, [=](Parameters parameters, std::optional<std::uint64_t> seed) {
            auto optimizer = std::make_shared<Optimizer>(std::move(parameters), options);
            if (seed) optimizer->stochastic_rounding(*seed);
            return optimizer;
          }};
}
const std::vector<Kind> kinds{
    kind<ga::optim::SGD>("SGD", SGDOptions(0.1)),
    kind<ga::optim::SGD>("momentum", SGDOptions(0.1).momentum(0.9).weight_decay(0.1)),
    kind<ga::optim::Adam>("Adam", torch::optim::AdamOptions(0.01).amsgrad(true)),
    kind<ga::optim::AdamW>("AdamW", torch::optim::AdamWOptions(0.01)),
    kind<ga::optim::Adam8bit>("Adam8bit", ga::optim::Adam8bitOptions(0.01)),
    kind<ga::optim::AdamW8bit>("AdamW8bit", ga::optim::AdamW8bitOptions(0.01)),
};

void step(torch::optim::Optimizer& optimizer, const Parameters& parameters, int seed) {
  for (auto& parameter : parameters) parameter.mutable_grad() = gradient_like(parameter, seed);
  optimizer.step();
}

at::Tensor run(const Kind& kind, at::ScalarType dtype, std::optional<std::uint64_t> seed, int steps = 4) {
  const auto parameters = parameters_of(dtype);
  const auto optimizer = kind.make(parameters, seed);
  for (int i = 0; i < steps; ++i) step(*optimizer, parameters, i);
  Parameters all;
  for (auto& parameter : parameters) all.push_back(parameter.detach());
  return torch::cat(all);
}

}  // namespace

TEST_CASE("stochastic rounding: the mean is exact, and rounding to the nearest number loses all steps") {
  CHECK(mean_of(after_small_steps(1, {})) == 1);  // control
  CHECK(mean_of(after_small_steps(50, {})) == 1);
  const double once = std::ldexp(1.0, -11), width = std::ldexp(1.0, -8);
  for (std::uint64_t seed : {0, 1, 2, 12345}) {
    const auto numbers = after_small_steps(1, seed);
    CHECK(numbers.ne(1).logical_and(numbers.ne(1 - width)).sum().item<int>() == 0);
    const double deviation = width * std::sqrt(once / width / (1 << 16));
    CHECK(std::abs(mean_of(numbers) - (1 - once)) < 4 * deviation);
    CHECK(std::abs(mean_of(after_small_steps(50, seed)) - (1 - 50 * once)) < 4 * std::sqrt(50.0) * deviation);
  }
}

TEST_CASE("stochastic rounding: every number is rounded independently, of its neighbors and of other steps") {
  const auto a = after_small_steps(1, 7).ne(1), b = after_small_steps(1, 8).ne(1);
  const auto share = [](const at::Tensor& t) { return t.to(at::kDouble).mean().item<double>(); };
  const double each = 1.0 / 8, n = 1 << 16, deviation = std::sqrt(each * (1 - each) / n);
  CHECK(std::abs(share(a) - each) < 4 * deviation);
  const auto independent = [&](const at::Tensor& x, const at::Tensor& y) {
    CHECK(std::abs(share(x.logical_and(y)) - each * each) < 5 * std::sqrt(each * each / n));
  };
  independent(a, b);
  for (int distance : {1, 2, 15, 16, 64, 256}) independent(a, a.roll(distance));
  // Two parameters of one optimizer, and two steps of one parameter.
  Parameters parameters{ones(1 << 16), ones(1 << 16)};
  ga::optim::SGD sgd(parameters, SGDOptions(std::ldexp(1.0, -11)));
  sgd.stochastic_rounding(7);
  std::vector<at::Tensor> moved;
  for (int i = 0; i < 2; ++i) {
    for (auto& parameter : parameters) {
      parameter.detach().fill_(1);
      parameter.mutable_grad() = torch::ones({1 << 16}, at::kBFloat16);
    }
    sgd.step();
    for (auto& parameter : parameters) moved.push_back(parameter.detach().ne(1));
  }
  CHECK(torch::equal(moved[0], a));
  for (std::size_t i = 0; i < moved.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) independent(moved[i], moved[j]);
}

TEST_CASE("stochastic rounding: numbers that bfloat16 can represent stay, inf and NaN as well") {
  const double inf = std::numeric_limits<double>::infinity();
  auto parameter =
      leaf(torch::tensor({0.0, -0.0, 1.0, -2.5, 1e-40, 3.3895e38, inf, -inf, std::nan("")}).to(at::kBFloat16));
  const auto before = parameter.detach().clone();
  ga::optim::SGD sgd({parameter}, SGDOptions(1.0));
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    sgd.stochastic_rounding(seed);
    parameter.mutable_grad() = torch::zeros_like(before);
    sgd.step();
    CHECK(torch::equal(parameter.detach().nan_to_num(7, 8, 9), before.nan_to_num(7, 8, 9)));
  }
}

TEST_CASE("stochastic rounding: a seed gives the same bits with any number of threads") {
  for (auto& kind : kinds) {
    INFO(kind.name);
    const auto first = run(kind, at::kBFloat16, 5);
    CHECK(torch::equal(run(kind, at::kBFloat16, 5), first));
    CHECK_FALSE(torch::equal(run(kind, at::kBFloat16, 6), first));
    CHECK_FALSE(torch::equal(run(kind, at::kBFloat16, {}), first));
    const auto threads = at::get_num_threads();
    at::set_num_threads(3);
    CHECK(torch::equal(run(kind, at::kBFloat16, 5), first));
    at::set_num_threads(threads);
    // The result is near that of rounding to the nearest number: 4 steps differ by at most 1 part in 128 each.
    const auto nearest = run(kind, at::kBFloat16, {}).to(at::kFloat);
    CHECK(((first.to(at::kFloat) - nearest).abs() <= 0.04 * nearest.abs() + 0.01).all().item<bool>());
  }
}

TEST_CASE("stochastic rounding: a step that is refused takes no random numbers") {
  for (auto& kind : kinds) {
    INFO(kind.name);
    const auto after_a_step = [&](bool refused) {
      auto parameters = parameters_of(at::kBFloat16);
      const auto optimizer = kind.make(parameters, 3);
      auto last = parameters.back();
      parameters.pop_back();
      if (refused) {
        for (auto& parameter : parameters) parameter.mutable_grad() = gradient_like(parameter, 1);
        last.mutable_grad() = gradient_like(last, 1);
        last.set_data(torch::zeros({2}, at::kBFloat16));  // a shape that differs from the gradient's
        REQUIRE_ERROR("must have the shape", optimizer->step());
        last.mutable_grad().reset();
      }
      step(*optimizer, parameters, 0);
      return torch::cat(parameters).detach();
    };
    CHECK(after_a_step(true).equal(after_a_step(false)));
  }
}

TEST_CASE("stochastic rounding: parameters of other types are not affected") {
  for (auto& kind : kinds)
    for (auto dtype : {at::kFloat, at::kHalf}) {
      INFO(kind.name << ", " << dtype);
      CHECK(torch::equal(run(kind, dtype, 5), run(kind, dtype, {})));
    }
}

TEST_CASE("stochastic rounding: the same random bits for every instruction set") {
  const auto p = torch::randn({1000}, at::kBFloat16), g = torch::full({1000}, std::ldexp(1.0, -13));
  std::vector<at::Tensor> results;
  for (auto set : testing::instruction_sets()) {
    auto q = p.clone();
    const inner::Operand operand{.parameter = q.mutable_data_ptr(), .gradient = g.const_data_ptr(), .rounding_key = 99};
    const auto step = [&](std::int64_t from, std::int64_t count) {
      testing::run_kernel(set, inner::SgdStep{.lr = 1}, {at::kBFloat16, at::kFloat, /*rounded=*/true}, operand, count,
                          from);
    };
    step(0, 300);  // in parts, because a number's bits depend only on its index
    step(300, 700);
    results.push_back(q);
  }
  for (auto& result : results) CHECK(torch::equal(result, results.front()));
  CHECK_FALSE(torch::equal(results.front(), p));
}

TEST_CASE("stochastic rounding: after saving and loading, the next steps are the same to the bit") {
  for (auto& kind : kinds) {
    INFO(kind.name);
    const auto expected = run(kind, at::kBFloat16, 5, 6);
    const auto resumed = [&](bool load) {
      const auto parameters = parameters_of(at::kBFloat16);
      std::stringstream file;
      {
        const auto optimizer = kind.make(parameters, 5);
        for (int i = 0; i < 3; ++i) step(*optimizer, parameters, i);
        torch::save(*optimizer, file);
      }
      const auto optimizer = kind.make(parameters, 5);
      if (load) torch::load(*optimizer, file);
      for (int i = 3; i < 6; ++i) step(*optimizer, parameters, i);
      Parameters all;
      for (auto& parameter : parameters) all.push_back(parameter.detach());
      return torch::cat(all);
    };
    CHECK(torch::equal(resumed(true), expected));
    CHECK_FALSE(torch::equal(resumed(false), expected));
  }
}

TEST_CASE("stochastic rounding: the named state has the number of roundings per parameter") {
  torch::nn::Linear model(80, 70);
  model->to(at::kBFloat16);
  ga::optim::SGD original(model->parameters(), SGDOptions(0.1)), other(model->parameters(), SGDOptions(0.1));
  original.stochastic_rounding(3);
  other.stochastic_rounding(3);
  for (int i = 0; i < 2; ++i) step(original, model->parameters(), i);
  const auto names = model->named_parameters();
  auto state = original.named_state(names);
  CHECK(state.at("rounding_step.weight").item<double>() == 2);
  other.load_named_state(names, state);
  const auto start = model->weight.detach().clone();
  step(original, model->parameters(), 9);
  const auto next = model->weight.detach().clone();
  model->weight.detach().copy_(start);
  step(other, model->parameters(), 9);
  CHECK(torch::equal(model->weight, next));
  state["rounding_step.weight"].fill_(-1);
  REQUIRE_ERROR("whole number >= 0", other.load_named_state(names, state));
}

TEST_CASE("stochastic rounding: sparse gradients, gaps between elements") {
  auto parameter = ones(1 << 12), dense = ones(1 << 12);
  for (auto* each : {&parameter, &dense}) {
    ga::optim::SGD sgd({*each}, SGDOptions(std::ldexp(1.0, -11)));
    sgd.stochastic_rounding(3);
    const auto gradient = torch::ones({1 << 12}, at::kBFloat16);
    each->mutable_grad() = each == &parameter ? gradient.to_sparse() : gradient;
    sgd.step();
  }
  CHECK(torch::equal(parameter, dense));
  auto gaps = torch::ones({1 << 12, 2}, at::kBFloat16).select(1, 0).set_requires_grad(true);
  ga::optim::SGD sgd({gaps}, SGDOptions(std::ldexp(1.0, -11)));
  sgd.stochastic_rounding(3);
  gaps.mutable_grad() = torch::ones({1 << 12}, at::kBFloat16);
  sgd.step();
  CHECK(torch::equal(gaps, dense));
}

TEST_CASE("stochastic rounding: ATen's operations for other devices round in the same way") {
  const auto numbers = torch::full({1 << 16}, 1 - std::ldexp(1.0, -11), at::kFloat);
  const auto rounded_by = [](const at::Tensor& all, std::uint64_t key) {
    const auto result = all.clone();
    inner::round_stochastically_(result, key, torch::empty_like(all, at::kInt), torch::empty_like(all, at::kBool));
    return result;
  };
  const auto rounded = rounded_by(numbers, 4);
  CHECK(torch::equal(rounded, rounded.to(at::kBFloat16).to(at::kFloat)));
  CHECK(mean_of(rounded) == Approx(mean_of(numbers)).margin(4 * std::ldexp(1.0, -8) * std::sqrt(1.0 / 8 / (1 << 16))));
  CHECK(torch::equal(rounded_by(numbers, 4), rounded));
  CHECK_FALSE(torch::equal(rounded_by(numbers, 5), rounded));
  const auto special = torch::tensor({std::nan(""), 1.0 / 0.0, -1.0 / 0.0, 0.0, -2.0});
  CHECK(torch::equal(rounded_by(special.to(at::kFloat), 4).nan_to_num(7), special.to(at::kFloat).nan_to_num(7)));
  const inner::ElementStep one{inner::SgdStep{.lr = 1},
                               torch::ones({1 << 12}, at::kBFloat16),
                               torch::full({1 << 12}, std::ldexp(1.0, -11), at::kBFloat16),
                               {},
                               4};
  step_on_device(std::vector{one}, inner::Multiplier());
  CHECK(one.parameter.ne(1).any().item<bool>());
  CHECK(one.parameter.eq(1).any().item<bool>());
}
