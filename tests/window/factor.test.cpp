// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>

#include <algorithm>

namespace ga = gradaccum;

namespace {

// Writes the factors in every order, and returns the distinct results.
template <class Product>
std::vector<double> results_of_all_orders(std::vector<double> factors, Product product) {
  std::sort(factors.begin(), factors.end());
  std::vector<double> results;
  do {
    results.push_back(product(factors));
  } while (std::next_permutation(factors.begin(), factors.end()));
  std::sort(results.begin(), results.end());
  results.erase(std::unique(results.begin(), results.end()), results.end());
  return results;
}

}  // namespace

TEST_CASE("Factor: any order of writers gives the same bits") {
  const std::vector<double> factors{0.1, 0.7, 1.3, 65537.0, 3.0};
  const auto multiplied = [](const std::vector<double>& in_order) {
    ga::Factor factor;
    for (double by : in_order) factor.multiply(by);
    return product_of(factor).host();
  };
  const auto divided = [](const std::vector<double>& in_order) {
    ga::Factor factor;
    for (double by : in_order) factor.divide(by);
    return product_of(factor).host();
  };
  CHECK(results_of_all_orders(factors, multiplied).size() == 1);
  CHECK(results_of_all_orders(factors, divided).size() == 1);
  // Control: multiplied in order, these factors give different results.
  const auto as_they_come = [](const std::vector<double>& in_order) {
    double product = 1;
    for (double by : in_order) product *= by;
    return product;
  };
  CHECK(results_of_all_orders(factors, as_they_come).size() > 1);
  ga::Factor exact;
  exact.divide(3.0);
  exact.divide(7.0);
  CHECK(product_of(exact).host() == 1 / 21.0);
}

TEST_CASE("Factor: host numbers and tensors are multiplied to one product") {
  ga::Factor factor;
  CHECK(product_of(factor).is_one());
  factor.multiply(3.0);
  factor.divide(torch::tensor(4.0));
  factor.multiply(torch::tensor(2, torch::kLong));
  CHECK(product_of(factor).host() == 1.5);
  CHECK(product_of(factor).on(at::kCPU).item<double>() == 1.5);
  CHECK_FALSE(product_of(factor).is_one());
}

TEST_CASE("Factor: a tensor counts with its value at the time of writing") {
  auto scale = torch::tensor(8.0);
  ga::Factor factor;
  factor.divide(scale);
  scale.fill_(2.0);
  CHECK(product_of(factor).host() == 0.125);
}

TEST_CASE("Factor: refuses values that are not numbers") {
  ga::Factor factor;
  REQUIRE_ERROR("Factor: a divisor must not be 0", factor.divide(0.0));
  REQUIRE_ERROR("Factor: a divisor must not be 0", factor.divide(torch::tensor(0.0)));
  REQUIRE_ERROR("0-dim tensor, got shape [2]", factor.multiply(torch::ones({2})));
  REQUIRE_ERROR("got an undefined tensor", factor.divide(at::Tensor()));
  CHECK(product_of(factor).is_one());
}

TEST_CASE("Factor: an overflowing product is not taken for 1") {
  ga::Factor factor;
  for (int i = 0; i < 2; ++i) {
    factor.multiply(1e200);
    factor.divide(1e200);
  }
  factor.multiply(7.0);
  CHECK_FALSE(product_of(factor).is_one());
}

TEST_CASE("Factor: device tensors are multiplied on the device, with the same bits in any order", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto a = torch::tensor(0.1, torch::kCUDA), b = torch::tensor(0.7, torch::kCUDA),
             c = torch::tensor(1.3, torch::kCUDA);
  ga::Factor one, other;
  for (auto& by : {a, b, c}) one.multiply(by);
  for (auto& by : {c, a, b}) other.multiply(by);
  CHECK_FALSE(product_of(one).on_host());
  CHECK(product_of(one).on(at::kCUDA).equal(product_of(other).on(at::kCUDA)));
}
