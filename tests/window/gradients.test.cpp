// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradients.hpp>

#include "support/models.hpp"

#include <limits>

namespace ga = gradaccum;
using namespace testing;

namespace {

at::Tensor with_gradient(const at::Tensor& gradient) {
  auto parameter = torch::zeros(gradient.sizes(), gradient.options().layout(at::kStrided)).set_requires_grad(true);
  parameter.mutable_grad() = gradient;
  return parameter;
}

double number(const at::Tensor& zero_dim) { return zero_dim.item<double>(); }

constexpr double infinity = std::numeric_limits<double>::infinity(),
                 not_a_number = std::numeric_limits<double>::quiet_NaN();

// Makes a sparse gradient with row 0 twice, which counts as their sum.
at::Tensor sparse_with_duplicates(double first, double second, at::ScalarType dtype) {
  return torch::sparse_coo_tensor(torch::tensor({{0, 0, 2}}), torch::tensor({first, second, 1.0}).to(dtype), {4});
}

}  // namespace

TEST_CASE("Gradients: the factor is deferred, and applied once") {
  auto p = with_gradient(torch::tensor({3.0, 4.0}));
  ga::Gradients gradients({p});
  gradients.factor().divide(2.0);
  gradients.factor().multiply(torch::tensor(3.0));
  CHECK(p.grad().equal(torch::tensor({3.0, 4.0})));
  CHECK(gradients.raw()[0].is_same(p.grad()));
  CHECK(number(gradients.norm()) == 7.5);
  CHECK(number(gradients.multiplier(at::kCPU)) == 1.5);
  CHECK(gradients.values()[0].equal(torch::tensor({4.5, 6.0})));
  gradients.apply();
  CHECK(p.grad().equal(torch::tensor({4.5, 6.0})));
  CHECK(number(gradients.multiplier(at::kCPU)) == 1.0);
  CHECK(number(gradients.norm()) == 7.5);
}

TEST_CASE("Gradients: copies are the same window") {
  auto p = with_gradient(torch::ones({2}));
  ga::Gradients gradients({p});
  auto copy = gradients;
  copy.factor().multiply(5.0);
  CHECK(gradients.values()[0].equal(torch::full({2}, 5.0)));
  CHECK(gradients.items() == 1.0);
}

TEST_CASE("Gradients: the norm is cached until a gradient changes") {
  auto p = with_gradient(torch::tensor({3.0, 4.0}, at::kDouble));
  ga::Gradients gradients({p});
  CHECK(number(gradients.norm()) == 5.0);
  p.mutable_grad().mul_(2);  // in place
  CHECK(number(gradients.norm()) == 10.0);
  p.mutable_grad() = torch::tensor({1.0, 0.0}, at::kDouble);  // another tensor
  CHECK(number(gradients.norm()) == 1.0);
  p.mutable_grad().reset();
  CHECK(number(gradients.norm()) == 0.0);
  CHECK(gradients.raw().empty());
}

TEST_CASE("Gradients: the norm is that of all gradients, of any dtype and shape") {
  torch::manual_seed(0);
  const auto a = torch::randn({3, 5}), b = torch::randn({7}).to(at::kBFloat16), c = torch::randn({}, at::kDouble),
             d = torch::randn({4}).to(at::kHalf), e = torch::empty({0}), f = torch::randn({6, 4}).t();
  std::vector<at::Tensor> parameters, numbers;
  for (auto& gradient : {a, b, c, d, e, f}) {
    parameters.push_back(with_gradient(gradient));
    numbers.push_back(gradient.to(at::kDouble).flatten());
  }
  parameters.push_back(torch::zeros({2}).set_requires_grad(true));  // no gradient
  parameters.push_back(torch::zeros({2}));                          // frozen
  ga::Gradients gradients(parameters);
  gradients.factor().multiply(-0.5);
  const auto expected = 0.5 * torch::cat(numbers).norm();
  CHECK(number(gradients.norm()) == Approx(number(expected)).epsilon(1e-14));
  CHECK(gradients.norm().scalar_type() == at::kDouble);
  CHECK(gradients.parameters().size() == 6);
  gradients.apply();
  CHECK(parameters[0].grad().equal(a));  // the same memory ...
  CHECK(parameters[3].grad().scalar_type() == at::kHalf);
}

TEST_CASE("Gradients: 16-bit gradients are multiplied in float32 precision") {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    auto p = with_gradient(torch::linspace(-3, 3, 100).to(dtype));
    const auto expected = p.grad().to(at::kFloat).mul(0.3337f).to(dtype);
    ga::Gradients gradients({p});
    gradients.factor().multiply(0.3337);
    CHECK(gradients.values()[0].equal(expected));
    // Control: a factor rounded to 16 bits gives another result.
    CHECK_FALSE((p.grad().to(at::kFloat) * torch::tensor(0.3337).to(dtype).to(at::kFloat)).to(dtype).equal(expected));
  }
}

TEST_CASE("Gradients: a shared parameter is multiplied once") {
  auto p = with_gradient(torch::ones({2}));
  ga::Gradients gradients({p, p});
  gradients.factor().multiply(3.0);
  CHECK(gradients.values().size() == 1);
  CHECK(p.grad().equal(torch::full({2}, 3.0)));
}

TEST_CASE("Gradients: infinity and NaN are found in every position, dtype and layout") {
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (double bad : {infinity, -infinity, not_a_number})
      for (int position = 0; position < 6; ++position) {
        const auto base = torch::ones({3, 2}, dtype);
        auto transposed = torch::ones({2, 3}, dtype).t(), sliced = torch::ones({3, 4}, dtype).slice(1, 0, 4, 2);
        for (auto gradient : {base, transposed, sliced}) {
          auto good = with_gradient(torch::ones({5}, at::kDouble)), p = with_gradient(gradient);
          ga::Gradients gradients({good, p});
          CHECK(number(gradients.found_inf()) == 0);
          p.mutable_grad()[position / 2][position % 2] = bad;
          CHECK(number(gradients.found_inf()) == 1);
          CHECK(gradients.found_inf().scalar_type() == at::kFloat);
        }
      }
}

TEST_CASE("Gradients: finite numbers with overflowing squares count as finite") {
  for (auto [dtype, large] :
       {std::pair{at::kFloat, 3e38}, {at::kBFloat16, 3e38}, {at::kHalf, 6e4}, {at::kDouble, 1e300}}) {
    auto p = with_gradient(torch::full({4}, large, dtype));
    ga::Gradients gradients({p});
    CHECK(number(gradients.found_inf()) == 0);
    if (dtype != at::kDouble) CHECK(number(gradients.norm()) == Approx(2 * number(p.grad()[0])));
  }
}

TEST_CASE("Gradients: with require_finite, the result stands even if the user replaces the gradient") {
  auto p = with_gradient(torch::tensor({1.0, infinity}));
  ga::Gradients gradients({p});
  gradients.factor().require_finite();
  gradients.apply();
  p.mutable_grad().fill_(1.0);
  CHECK(gradients.finite_required());
  CHECK(number(gradients.found_inf()) == 1);
  // Control: without require_finite, the current gradient counts.
  ga::Gradients free({p});
  CHECK(number(free.found_inf()) == 0);
}

TEST_CASE("Gradients: sparse gradients count with their duplicates summed") {
  auto p = with_gradient(sparse_with_duplicates(3, 1, at::kDouble));
  ga::Gradients gradients({p});
  CHECK(number(gradients.norm()) == Approx(std::sqrt(17.0)));  // not sqrt(9 + 1 + 1)
  gradients.factor().multiply(2.0);
  CHECK(gradients.values()[0].to_dense().equal(torch::tensor({8.0, 0.0, 2.0, 0.0}, at::kDouble)));
  CHECK(p.grad().is_sparse());

  auto half = with_gradient(sparse_with_duplicates(64000, 64000, at::kHalf));  // both are finite, their sum is not
  CHECK(number(ga::Gradients({half}).found_inf()) == 1);
  auto fine = with_gradient(sparse_with_duplicates(64000, -64000, at::kHalf));
  CHECK(number(ga::Gradients({fine}).found_inf()) == 0);
}

TEST_CASE("Gradients: complex gradients have a norm and are multiplied") {
  auto p = with_gradient(torch::complex(torch::tensor({3.0, 0.0}), torch::tensor({0.0, 4.0})));
  ga::Gradients gradients({p});
  CHECK(number(gradients.norm()) == Approx(5.0));
  gradients.factor().multiply(2.0);
  gradients.apply();
  CHECK(number(torch::real(p.grad())[0]) == 6.0);
}

TEST_CASE("Gradients: a factor that makes a finite gradient overflow is detected") {
  auto p = with_gradient(torch::full({2}, 3e38f));
  ga::Gradients gradients({p});
  CHECK(number(gradients.norm()) > 4e38);
  CHECK(number(gradients.found_inf()) == 0);
  gradients.factor().multiply(10.0);
  gradients.apply();
  CHECK(number(gradients.found_inf()) == 1);
}

TEST_CASE("Gradients: lists may be iterated while others are created, and outlive the handle") {
  auto p = with_gradient(torch::ones({2})), q = with_gradient(torch::ones({2}));
  double sum = 0;
  for (auto& gradient : ga::Gradients({p, q}).values()) sum += number(gradient.sum() + ga::Gradients({p}).norm());
  CHECK(sum == Approx(4 + 2 * std::sqrt(2.0)));
}

TEST_CASE("Gradients: accepts no gradient at all") {
  ga::Gradients gradients({torch::zeros({2}).set_requires_grad(true)});
  gradients.factor().multiply(2.0);
  CHECK(number(gradients.norm()) == 0);
  CHECK(number(gradients.found_inf()) == 0);
  gradients.apply();
  CHECK(gradients.values().empty());
  CHECK(number(ga::Gradients(std::vector<at::Tensor>()).norm()) == 0);
}

TEST_CASE("Gradients: an undefined parameter is refused") {
  REQUIRE_ERROR("Gradients: a parameter is an undefined tensor", ga::Gradients({at::Tensor()}));
}

TEST_CASE("Gradients: several devices", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  auto cpu = with_gradient(torch::tensor({3.0})), gpu = with_gradient(torch::tensor({4.0}, at::kCUDA));
  auto gpu16 = with_gradient(torch::tensor({12.0}, at::kCUDA).to(at::kBFloat16));
  ga::Gradients gradients({gpu, cpu, gpu16});
  CHECK(number(gradients.norm()) == 13.0);
  gradients.factor().multiply(torch::tensor(0.5, at::kCUDA));
  CHECK(number(gradients.norm()) == 6.5);
  gradients.apply();
  CHECK(number(cpu.grad()) == 1.5);
  CHECK(number(gpu.grad()) == 2.0);
  CHECK(number(gpu16.grad()) == 6.0);
  gpu.mutable_grad().fill_(not_a_number);
  CHECK(number(gradients.found_inf()) == 1);
}
