// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/metrics.hpp>

#include <cmath>
#include <limits>
#include <sstream>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

ga::Loss loss_with(const at::Tensor& output, const at::Tensor& target) {
  return ga::Loss{torch::zeros({}), target.numel()}.with(output, target);
}

double accuracy_of(ga::Accuracy accuracy, const std::vector<std::pair<at::Tensor, at::Tensor>>& batches) {
  for (auto& [output, target] : batches) accuracy.add(loss_with(output, target));
  return accuracy.value();
}

// [N, C, T] and [N, T], counted by hand.
double counted(const at::Tensor& output, const at::Tensor& target, std::int64_t ignored) {
  int right = 0, all = 0;
  const auto at = [&](int n, int c, int t) { return output[n][c][t].item<double>(); };
  for (int n = 0; n < output.size(0); ++n)
    for (int t = 0; t < output.size(2); ++t) {
      const auto wanted = target[n][t].item<std::int64_t>();
      if (wanted == ignored) continue;
      int best = 0;
      for (int c = 1; c < output.size(1); ++c)
        if (at(n, c, t) > at(n, best, t)) best = c;
      right += best == wanted;
      ++all;
    }
  return static_cast<double>(right) / all;
}

const auto logits = torch::tensor({{2.0, 1.0, 0.0}, {0.0, 3.0, 1.0}, {1.0, 0.0, 4.0}, {1.0, 0.5, 0.0}});  // 0, 1, 2, 0

}  // namespace

TEST_CASE("Accuracy: the share of targets that have the highest output") {
  CHECK(accuracy_of({}, {{logits, torch::tensor({0, 1, 2, 0})}}) == 1.0);
  CHECK(accuracy_of({}, {{logits, torch::tensor({0, 1, 0, 1})}}) == 0.5);
  CHECK(accuracy_of({}, {{logits, torch::tensor({1, 2, 0, 1})}}) == 0.0);
  CHECK(accuracy_of({}, {{logits, torch::tensor({0, 0, 2, 0}, at::kInt)}}) == 0.75);
  CHECK(accuracy_of({}, {{logits.to(at::kBFloat16), torch::tensor({0, 0, 2, 0})}}) == 0.75);
  const auto strided = torch::tensor({0, 9, 0, 9, 2, 9, 0, 9}).slice(0, 0, 8, 2);
  CHECK(accuracy_of({}, {{logits.t().contiguous().t(), strided}}) == 0.75);
  CHECK(accuracy_of({}, {{logits.clone().set_requires_grad(true), torch::tensor({0, 0, 2, 0})}}) == 0.75);
}

TEST_CASE("Accuracy: counts over batches, not a mean of their shares") {
  CHECK(accuracy_of(
            {}, {{logits.slice(0, 0, 3), torch::tensor({0, 1, 2})}, {logits.slice(0, 3), torch::tensor({1})}}) == 0.75);
}

TEST_CASE("Accuracy: classes in dimension 1, or in another one") {
  torch::manual_seed(0);
  const auto output = torch::randn({5, 3, 7});
  const auto target = torch::randint(3, {5, 7});
  const auto expected = counted(output, target, -100);
  CHECK(accuracy_of({}, {{output, target}}) == expected);
  CHECK(accuracy_of({.dim = -1}, {{output.transpose(1, 2), target}}) == expected);
  CHECK(accuracy_of({.dim = 0}, {{output.transpose(0, 1), target}}) == expected);
  CHECK(expected < 0.6);  // chance
}

TEST_CASE("Accuracy: ignored targets do not count") {
  torch::manual_seed(0);
  const auto output = torch::randn({5, 3, 7});
  const auto target = torch::randint(3, {5, 7});
  const auto some = target.masked_fill(torch::rand({5, 7}) < 0.5, -100);
  CHECK(accuracy_of({}, {{output, some}}) == counted(output, some, -100));
  CHECK(accuracy_of({.ignore_index = 0}, {{output, target}}) == counted(output, target, 0));
  CHECK(counted(output, some, -100) != counted(output, target, -100));
  CHECK(counted(output, target, 0) != counted(output, target, -100));
  // an ignored class that is found right, too
  CHECK(accuracy_of({.ignore_index = 0}, {{logits, torch::tensor({0, 1, 0, 0})}}) == 1.0);
}

TEST_CASE("Accuracy: of nothing is NaN, and an empty batch changes nothing") {
  CHECK(std::isnan(ga::Accuracy{}.value()));
  CHECK(std::isnan(accuracy_of({}, {{logits, torch::full({4}, -100)}})));
  const auto none = torch::empty({0, 3});
  const auto no_target = torch::empty({0}, at::kLong);
  CHECK(std::isnan(accuracy_of({}, {{none, no_target}})));
  CHECK(accuracy_of({}, {{none, no_target}, {logits, torch::tensor({0, 0, 2, 0})}, {none, no_target}}) == 0.75);
}

TEST_CASE("Accuracy: what does not go together is refused") {
  ga::Accuracy accuracy;
  REQUIRE_ERROR(
      "Accuracy: needs the model's output and the target; return ga::Loss{mean, items}.with(output, target) from",
      accuracy.add(ga::Loss{torch::zeros({}), 4}));
  REQUIRE_ERROR("Accuracy: needs the model's output", accuracy.add(loss_with({}, torch::zeros({1}))));
  REQUIRE_ERROR("Accuracy: an output of shape [4, 3] with classes in dim 1 needs a target of shape [4], got [3]",
                accuracy.add(loss_with(logits, torch::zeros({3}, at::kLong))));
  REQUIRE_ERROR("needs a target of shape [4], got [4, 1]",
                accuracy.add(loss_with(logits, torch::zeros({4, 1}, at::kLong))));
  REQUIRE_ERROR("Accuracy: dim must be one of the output, of shape [4], got 1",
                accuracy.add(loss_with(logits.select(1, 0), torch::zeros({4}, at::kLong))));
  ga::Accuracy other{.dim = -3};
  REQUIRE_ERROR("of shape [4, 3], got -3", other.add(loss_with(logits, torch::zeros({4}, at::kLong))));
  CHECK_FALSE(accuracy.right.defined());
}

TEST_CASE("MeanLoss: weighted by items") {
  ga::MeanLoss mean;
  CHECK(std::isnan(mean.value()));
  mean.add(ga::Loss{torch::tensor(1.0, at::kDouble), 1});
  mean.add(ga::Loss{torch::tensor(5.0, at::kDouble), 3});
  CHECK(mean.value() == 4.0);
  CHECK(mean.items() == 4.0);
  mean.add(ga::Loss{torch::tensor(not_a_number), 0});  // a mean over nothing
  CHECK(mean.value() == 4.0);
  mean.add(ga::Loss{torch::tensor(2.0, at::kBFloat16), 4});
  CHECK(mean.value() == 3.0);
  mean.add(ga::Loss{torch::tensor(not_a_number), 1});
  CHECK(std::isnan(mean.value()));
}

namespace {

struct Largest {
  static constexpr std::string_view name = "largest";
  double largest = 0;
  void add(const ga::Loss& loss) { largest = std::max(largest, loss.mean.item<double>()); }
  double value() { return largest; }  // not const
};
struct Named {
  std::string name;
  double asked = 0;
  void add(const ga::Loss&) { ++asked; }
  double value() const { return asked; }
};
struct NoName {
  void add(const ga::Loss&) {}
  double value() const { return 0; }
};
struct NoAdd {
  static constexpr std::string_view name = "no_add";
  double value() const { return 0; }
};
struct NoNumber {
  static constexpr std::string_view name = "no_number";
  void add(const ga::Loss&) {}
  std::string value() const { return ""; }
};

}  // namespace

TEST_CASE("metric: what is one, and what is none") {
  STATIC_REQUIRE(ga::metric<ga::MeanLoss>);
  STATIC_REQUIRE(ga::metric<ga::Accuracy>);
  STATIC_REQUIRE(ga::metric<Largest>);
  STATIC_REQUIRE(ga::metric<Named>);
  STATIC_REQUIRE_FALSE(ga::metric<NoName>);
  STATIC_REQUIRE_FALSE(ga::metric<NoAdd>);
  STATIC_REQUIRE_FALSE(ga::metric<NoNumber>);
  STATIC_REQUIRE_FALSE(ga::metric<double>);
}

TEST_CASE("Evaluator: the mean loss, and what else was asked for") {
  inner::Evaluator evaluator(Largest{}, Named{"count_a"}, Named{"count_b"}, ga::Accuracy{});
  evaluator.add(ga::Loss{torch::tensor(1.0), 1}.with(logits, torch::tensor({0, 1, 0, 1})), 4);
  evaluator.add(ga::Loss{torch::tensor(5.0), 3}.with(logits, torch::tensor({0, 1, 2, 0})), 4);
  const auto result = evaluator.result();
  CHECK(result["loss"] == 4.0);
  CHECK(result["largest"] == 5.0);
  CHECK(result["count_a"] == 2.0);
  CHECK(result["count_b"] == 2.0);
  CHECK(result["accuracy"] == 0.75);
  CHECK(result.metrics.size() == 5);
  CHECK(result.items == 4);
  CHECK(result.samples == 8);
  CHECK(result.seconds > 0);
}

TEST_CASE("Evaluator: two metrics of one name are refused") {
  REQUIRE_ERROR("got two 'accuracy'", inner::Evaluator(ga::Accuracy{}, ga::Accuracy{.dim = -1}));
  REQUIRE_ERROR("got two 'loss'", inner::Evaluator(Named{"loss"}));
}

TEST_CASE("Evaluation: prints its metrics with six digits, whatever the stream is set to") {
  std::ostringstream text;
  text.precision(2);
  text << ga::Evaluation{.metrics = {{"loss", 0.625}, {"accuracy", 0.784}}};
  CHECK(text.str() == "accuracy: 0.784000, loss: 0.625000");
  std::ostringstream other;
  other << ga::Evaluation{.metrics = {{"a", 1.0}, {"b", 12345.678}, {"c", 1.25e-9}, {"d", not_a_number}}};
  CHECK(other.str() == "a: 1.00000, b: 12345.7, c: 1.25000e-09, d: nan");
}

TEST_CASE("Evaluation: a name that it does not have") {
  const ga::Evaluation evaluation{.metrics = {{"loss", 0.5}}};
  CHECK(evaluation["loss"] == 0.5);
  REQUIRE_ERROR("Evaluation: has no metric 'f1'; pass one to evaluate()", evaluation["f1"]);
}

TEST_CASE("Accuracy and MeanLoss: on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  CHECK(accuracy_of({}, {{logits.cuda(), torch::tensor({0, 1, 0, 1}).cuda()}}) == 0.5);
  ga::MeanLoss mean;
  mean.add(ga::Loss{torch::tensor(1.0).cuda(), 1});
  mean.add(ga::Loss{torch::tensor(5.0).cuda(), 3});
  mean.add(ga::Loss{torch::tensor(not_a_number).cuda(), 0});
  CHECK(mean.value() == 4.0);
}
