// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpoint.hpp>
#include <gradaccum/flop_counter.hpp>

#include "pytorch_values/flop_counter.hpp"

#include <torch/torch.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

// The networks of flop_counter.py, counted in C++.

namespace ga = gradaccum;

namespace {

using Sizes = std::vector<std::int64_t>;

struct Network {
  Sizes x, weight;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)> run;
};

const Sizes sequences{2, 4, 16, 8};

const std::map<std::string, Network> networks = {
    {"linear",
     {{5, 7, 16},
      {24, 16},
      [](const at::Tensor& x, const at::Tensor& w) { return torch::linear(x, w, w.select(1, 0)); }}},
    {"matmul", {{2, 3, 5, 7}, {7, 4}, [](const at::Tensor& x, const at::Tensor& w) { return torch::matmul(x, w); }}},
    {"bmm", {{6, 5, 7}, {6, 7, 4}, [](const at::Tensor& x, const at::Tensor& w) { return torch::bmm(x, w); }}},
    {"baddbmm",
     {{6, 5, 7},
      {6, 7, 4},
      [](const at::Tensor& x, const at::Tensor& w) { return torch::baddbmm(x.slice(2, 0, 1), x, w); }}},
    {"matrix_vector", {{5, 7}, {7}, [](const at::Tensor& x, const at::Tensor& w) { return torch::mv(x, w); }}},
    {"conv1d",
     {{3, 8, 20}, {6, 8, 5}, [](const at::Tensor& x, const at::Tensor& w) { return torch::conv1d(x, w, {}, 2, 1); }}},
    {"conv2d_dilated",
     {{3, 8, 12, 10},
      {6, 8, 3, 2},
      [](const at::Tensor& x, const at::Tensor& w) {
        return torch::conv2d(x, w, {}, {2, 1}, at::IntArrayRef{0, 1}, 2);
      }}},
    {"conv2d_groups",
     {{3, 8, 12, 10},
      {6, 4, 3, 2},
      [](const at::Tensor& x, const at::Tensor& w) { return torch::conv2d(x, w, {}, 1, at::IntArrayRef{0}, 1, 2); }}},
    {"conv_transpose2d",
     {{3, 8, 12, 10},
      {8, 6, 3, 2},
      [](const at::Tensor& x, const at::Tensor& w) { return torch::conv_transpose2d(x, w, {}, 2, 1); }}},
    {"conv3d",
     {{2, 3, 6, 7, 8}, {4, 3, 2, 3, 3}, [](const at::Tensor& x, const at::Tensor& w) { return torch::conv3d(x, w); }}},
    {"attention",
     {sequences, sequences,
      [](const at::Tensor& x, const at::Tensor& w) { return at::scaled_dot_product_attention(x, w, w); }}},
    {"attention_of_parts",
     {sequences, sequences,
      [](const at::Tensor& x, const at::Tensor& w) { return torch::matmul(torch::matmul(x, w.mT()).softmax(-1), w); }}},
};

std::int64_t flops_of(const Network& network, bool needs_x, at::ScalarType dtype = at::kFloat) {
  const auto x = torch::ones(network.x, dtype).requires_grad_(needs_x);
  const auto weight = torch::ones(network.weight, dtype).requires_grad_();
  const ga::FlopCounter counter;
  network.run(x, weight).sum().backward();
  return counter.get_total_flops();
}

std::int64_t flops_of_product() {
  const ga::FlopCounter counter;
  torch::ones({2, 3}).mm(torch::ones({3, 5}));
  return counter.get_total_flops();
}

}  // namespace

TEST_CASE("FlopCounter: counts the passes of networks as Python's FlopCounterMode") {
  REQUIRE(networks.size() == pytorch_values::flops.size());
  for (auto& [name, expected] : pytorch_values::flops) {
    CAPTURE(name);
    CHECK(flops_of(networks.at(name), true) == expected.with_input);
    CHECK(flops_of(networks.at(name), false) == expected.without);
    if (name == "attention") continue;  // other kernels for other dtypes
    CHECK(flops_of(networks.at(name), true, at::kDouble) == expected.with_input);
  }
}

TEST_CASE("FlopCounter: by operation, without elementwise ones, and without those of other threads") {
  const ga::FlopCounter counter;
  const auto a = torch::ones({2, 3}), b = torch::ones({3, 5});
  a.add(1).exp();
  CHECK(counter.get_flop_counts().empty());
  a.mm(b);
  torch::addmm(torch::ones({5}), a, b);
  std::int64_t elsewhere = 0;
  std::thread([&] { a.mm(b), elsewhere = flops_of_product(); }).join();
  CHECK(elsewhere == 60);
  CHECK(counter.get_flop_counts() == std::map<std::string, std::int64_t>{{"aten::addmm", 60}, {"aten::mm", 60}});
  CHECK(counter.get_total_flops() == 120);
}

TEST_CASE("FlopCounter: counts from its construction until its destruction, also inside another one") {
  CHECK(flops_of_product() == 60);
  std::optional<ga::FlopCounter> counter(std::in_place);
  CHECK(flops_of_product() == 60);
  CHECK(counter->get_total_flops() == 60);
  REQUIRE_THROWS(torch::ones({2, 3}).mm(torch::ones({2, 3})));
  counter.reset();
  CHECK_FALSE(at::hasCallbacks());
  CHECK(flops_of_product() == 60);
}

TEST_CASE("FlopCounter: a backward pass that checkpoints run again counts as without them") {
  const auto flops = [](bool checkpoints) {
    const auto weight = torch::ones({6, 6}).requires_grad_();
    const auto part = [&](const at::Tensor& x) { return x.mm(weight).tanh().mm(weight); };
    const ga::FlopCounter counter;
    const auto x = torch::ones({4, 6}).requires_grad_();
    (checkpoints ? ga::checkpoint(part, x) : part(x)).sum().backward();
    return counter.get_total_flops();
  };
  CHECK(flops(true) == flops(false));
}

TEST_CASE("measure_peak_flops: leaves the program's random numbers, and refuses a negative size") {
  torch::manual_seed(3);
  const auto expected = torch::rand({4});
  torch::manual_seed(3);
  CHECK(ga::measure_peak_flops(at::kCPU, at::kFloat, 64) > 0);
  CHECK(torch::equal(torch::rand({4}), expected));
  REQUIRE_ERROR("measure_peak_flops: rows must be >= 0, got -1", ga::measure_peak_flops(at::kCPU, at::kFloat, -1));
}

TEST_CASE("FlopCounter: empty tensors") {
  const ga::FlopCounter counter;
  torch::ones({0, 3}).mm(torch::ones({3, 5}));
  torch::conv1d(torch::ones({0, 2, 8}), torch::ones({4, 2, 3}));
  CHECK(counter.get_total_flops() == 0);
}
