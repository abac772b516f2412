// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradients.hpp>

#include "support/models.hpp"

#include <limits>

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> parameters_with_gradients(at::ScalarType dtype) {
  auto model = make_model(dtype);
  loss_of(model, make_batches({7}, dtype)[0]).backward();
  return model->parameters();
}

at::Tensor gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> all;
  for (auto& p : parameters) all.push_back(p.grad().flatten());
  return torch::cat(all);
}

}  // namespace

TEST_CASE("clip_grad_norm_: gives LibTorch's result, without its wait") {
  for (auto dtype : {at::kDouble, at::kFloat})
    for (double max : {0.01, 1e6, infinity})
      for (double type : {1.0, 2.0, 3.5, infinity}) {
        INFO(dtype << ", max " << max << ", norm " << type);
        auto ours = parameters_with_gradients(dtype), theirs = parameters_with_gradients(dtype);
        const double tolerance = dtype == at::kDouble ? 1e-13 : 1e-6;
        const auto norm = ga::clip_grad_norm_(ours, max, type);
        CHECK(norm.item<double>() == Approx(torch::nn::utils::clip_grad_norm_(theirs, max, type)).epsilon(tolerance));
        CHECK(norm.dim() == 0);
        CHECK(distance(gradients_of(ours), gradients_of(theirs)) < tolerance);
      }
}

TEST_CASE("clip_grad_norm_: NaN and inf as in LibTorch; or an error, and nothing is clipped") {
  for (double bad : {infinity, std::numeric_limits<double>::quiet_NaN()}) {
    auto ours = parameters_with_gradients(at::kDouble), theirs = parameters_with_gradients(at::kDouble);
    for (auto* parameters : {&ours, &theirs}) (*parameters)[0].mutable_grad()[0][0] = bad;
    const auto before = gradients_of(ours).clone();
    REQUIRE_ERROR("clip_grad_norm_: the norm must be finite, got", ga::clip_grad_norm_(ours, 1.0, 2.0, true));
    CHECK(at::allclose(gradients_of(ours), before, 0, 0, /*equal_nan=*/true));
    ga::clip_grad_norm_(ours, 1.0);
    torch::nn::utils::clip_grad_norm_(theirs, 1.0);
    CHECK(at::allclose(gradients_of(ours), gradients_of(theirs), 0, 0, /*equal_nan=*/true));
  }
}

TEST_CASE("clip_grad_norm_: accepts no parameters, no gradients, a shared parameter") {
  CHECK(ga::clip_grad_norm_(std::vector<at::Tensor>(), 1.0).item<double>() == 0);
  CHECK(ga::clip_grad_norm_(std::vector<at::Tensor>(), 1.0, infinity).item<double>() == 0);
  CHECK(ga::clip_grad_norm_({torch::zeros({2}).set_requires_grad(true)}, 1.0).item<double>() == 0);
  auto p = torch::zeros({2}).set_requires_grad(true);
  p.mutable_grad() = torch::tensor({3.0f, 4.0f});
  CHECK(ga::clip_grad_norm_({p, p}, 1.0).item<double>() == 5.0);
  CHECK(p.grad().norm().item<float>() == Approx(1.0f));
  REQUIRE_ERROR("norm_type must be > 0, got 0", ga::clip_grad_norm_({p}, 1.0, 0.0));
}

TEST_CASE("clip_grad_norm_: in a window it becomes a factor, applied later") {
  auto p = torch::zeros({2}).set_requires_grad(true);
  p.mutable_grad() = torch::tensor({30.0f, 40.0f});
  ga::Gradients gradients({p});
  gradients.factor().divide(5.0);  // the true norm is 10
  CHECK(ga::clip_grad_norm_(gradients, 1.0).item<double>() == 10.0);
  CHECK(p.grad()[0].item<float>() == 30.0f);
  CHECK(gradients.norm().item<double>() == Approx(1.0));
  CHECK(gradients.values()[0][0].item<float>() == Approx(0.6f));
}

TEST_CASE("clip_grad_value_: clamps elements, of sparse gradients the sums") {
  auto p = torch::zeros({3}).set_requires_grad(true), s = torch::zeros({3}).set_requires_grad(true);
  p.mutable_grad() = torch::tensor({-5.0f, 0.25f, std::numeric_limits<float>::quiet_NaN()});
  s.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1, 1, 2}}), torch::tensor({0.4f, 0.4f, -3.0f}), {3});
  ga::clip_grad_value_({p, s}, 0.5);
  CHECK(p.grad()[0].item<float>() == -0.5f);
  CHECK(p.grad()[1].item<float>() == 0.25f);
  CHECK(p.grad()[2].isnan().item<bool>());
  CHECK(s.grad().to_dense().equal(torch::tensor({0.0f, 0.5f, -0.5f})));
  REQUIRE_ERROR("clip_value must be >= 0, got -1", ga::clip_grad_value_({p}, -1.0));
}
