// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/metrics.hpp>

#include "support/ranks.hpp"

#include <array>
#include <atomic>
#include <cmath>
#include <functional>
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

// Computes the accuracy of [N, C, T] and [N, T] element by element.
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

TEST_CASE("Accuracy: the share of targets with the highest output") {
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
  CHECK(expected < 0.6);  // random guesses
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
  // An ignored class does not count even if it is predicted correctly.
  CHECK(accuracy_of({.ignore_index = 0}, {{logits, torch::tensor({0, 1, 0, 0})}}) == 1.0);
}

TEST_CASE("Accuracy: NaN without batches, and an empty batch changes nothing") {
  CHECK(std::isnan(ga::Accuracy{}.value()));
  CHECK(std::isnan(accuracy_of({}, {{logits, torch::full({4}, -100)}})));
  const auto none = torch::empty({0, 3});
  const auto no_target = torch::empty({0}, at::kLong);
  CHECK(std::isnan(accuracy_of({}, {{none, no_target}})));
  CHECK(accuracy_of({}, {{none, no_target}, {logits, torch::tensor({0, 0, 2, 0})}, {none, no_target}}) == 0.75);
}

TEST_CASE("Accuracy: mismatched outputs and targets are refused") {
  ga::Accuracy accuracy;
  REQUIRE_ERROR(
      "Accuracy: needs the model's output and the target; return ga::Loss{mean, items}.with(output, target) from",
      accuracy.add(ga::Loss{torch::zeros({}), 4}));
  REQUIRE_ERROR("Accuracy: needs the model's output", accuracy.add(loss_with({}, torch::zeros({1}))));
  REQUIRE_ERROR("Accuracy: an output of shape [4, 3] with classes in dim 1 needs a target of shape [4], got [3]",
                accuracy.add(loss_with(logits, torch::zeros({3}, at::kLong))));
  REQUIRE_ERROR("an output of shape [4] with one score for each target needs a target of that shape, got [3]",
                accuracy.add(loss_with(logits.select(1, 0), torch::zeros({3}, at::kLong))));
  REQUIRE_ERROR("a target of classes must have integers, got Float; convert it with .to(torch::kLong)",
                accuracy.add(loss_with(logits, torch::zeros({4}))));
  REQUIRE_ERROR("Accuracy: task must be given for a target of the output's shape [4, 3]: ga::Task::multilabel, ",
                accuracy.add(loss_with(logits, torch::zeros({4, 3}))));
  ga::Accuracy other{.dim = -3};
  REQUIRE_ERROR("of shape [4, 3] with one score for each target needs a target of that shape, got [4]",
                other.add(loss_with(logits, torch::zeros({4}, at::kLong))));
  ga::Accuracy classes{.task = ga::Task::multiclass}, labels{.dim = 2, .task = ga::Task::multilabel};
  REQUIRE_ERROR("Accuracy: needs an output with several classes in dim 1 for this task, got one of shape [4]",
                classes.add(loss_with(logits.select(1, 0), torch::zeros({4}, at::kLong))));
  REQUIRE_ERROR("several classes in dim 2 for this task, got one of shape [4, 3]",
                labels.add(loss_with(logits, torch::zeros({4, 3}))));
  CHECK_FALSE(accuracy.right.defined());
}

TEST_CASE("Accuracy: one score per row, above the threshold or not") {
  const auto scores = torch::tensor({-1.0, 2.0, 0.5, -4.0, 0.0});
  const auto column = scores.unsqueeze(1);
  const auto target = torch::tensor({0, 1, 0, 1, 0});  // right, right, wrong, wrong, right
  CHECK(accuracy_of({}, {{column, target.unsqueeze(1).to(at::kFloat)}}) == 0.6);
  CHECK(accuracy_of({}, {{column, target}}) == 0.6);
  CHECK(accuracy_of({}, {{scores, target.to(at::kBool)}}) == 0.6);
  CHECK(accuracy_of({}, {{scores, target.unsqueeze(1).to(at::kByte)}}) == 0.6);
  CHECK(accuracy_of({}, {{scores.slice(0, 0, 1), target.slice(0, 0, 1)}, {column.slice(0, 1), target.slice(0, 1)}}) ==
        0.6);  // the last batch may have one row
  CHECK(accuracy_of({.threshold = 0.5}, {{column.sigmoid(), target}}) == 0.6);
  CHECK(accuracy_of({}, {{column.sigmoid(), target}}) == 0.4);                          // all are above 0
  CHECK(accuracy_of({}, {{scores, torch::tensor({0.1, 0.9, 0.2, 0.8, 0.3})}}) == 0.6);  // smoothed
  CHECK(accuracy_of({}, {{scores, torch::tensor({-100, 1, 0, -100, 0})}}) == 2.0 / 3);
  CHECK(accuracy_of({}, {{torch::full({2, 1}, not_a_number), torch::tensor({0, 1})}}) == 0.0);
  CHECK(accuracy_of({.task = ga::Task::binary}, {{scores.reshape({1, 5}), target.reshape({1, 5})}}) == 0.6);
  // A mask of pixels, with and without its dimension of one class.
  const auto pixels = scores.slice(0, 0, 4).reshape({1, 1, 2, 2}), mask = target.slice(0, 0, 4).reshape({1, 2, 2});
  CHECK(accuracy_of({}, {{pixels, mask}}) == 0.5);
  CHECK(accuracy_of({}, {{pixels, mask.unsqueeze(1).to(at::kFloat)}}) == 0.5);
  REQUIRE_ERROR(
      "Accuracy: targets must be classes that the output has a score for, or from 0 to 1 if each has a score, got 2 "
      "others",
      accuracy_of({}, {{column, torch::tensor({0, 2, 1, -3, 0})}}));
}

TEST_CASE("Accuracy: targets in a column, probabilities, labels, and pixels") {
  CHECK(accuracy_of({}, {{logits, torch::tensor({0, 1, 0, 1}).unsqueeze(1)}}) == 0.5);
  const auto soft = torch::tensor({{0.6, 0.3, 0.1}, {0.2, 0.5, 0.3}, {0.8, 0.1, 0.1}, {0.9, 0.1, 0.0}});  // 0, 1, 0, 0
  CHECK(accuracy_of({.task = ga::Task::multiclass}, {{logits, soft}}) == 0.75);
  CHECK(accuracy_of({.task = ga::Task::multiclass}, {{logits, soft.ge(0.5)}}) == 0.75);
  const auto labels = torch::tensor({{1, 1, 0}, {0, 0, 0}, {1, 0, 1}, {-100, 0, 0}});
  const auto scores = logits.sub(0.1);  // {1, 1, 0}, {0, 1, 1}, {1, 0, 1}, {1, 1, 0}
  CHECK(accuracy_of({.task = ga::Task::multilabel}, {{scores, labels.to(at::kFloat)}}) == 8.0 / 11);
  torch::manual_seed(0);
  const auto output = torch::randn({2, 3, 4, 5});
  const auto target = torch::randint(3, {2, 4, 5});
  const auto expected = counted(output.flatten(2), target.flatten(1), -100);
  CHECK(accuracy_of({}, {{output, target}}) == expected);
  CHECK(accuracy_of({}, {{output, target.unsqueeze(1).to(at::kByte)}}) == expected);
  CHECK(accuracy_of({.dim = -1}, {{output.movedim(1, -1), target.unsqueeze(-1)}}) == expected);
  auto nan = logits.clone();
  nan[0][0] = not_a_number;
  CHECK(accuracy_of({}, {{nan, torch::tensor({0, 1, 2, 0})}}) == 0.75);
  REQUIRE_ERROR("got 1 others; exclude them with ignore_index",
                accuracy_of({}, {{logits, torch::tensor({0, 1, 3, 0})}}));
}

namespace {

/// Adds batches of different sizes.
template <class Metric>
Metric filled(Metric metric, const at::Tensor& output, const at::Tensor& target) {
  for (const auto& [from, to] : std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1}, {1, 3}, {3, output.size(0)}})
    metric.add(loss_with(output.slice(0, from, to), target.slice(0, from, to)));
  return metric;
}

/// Makes outputs with the highest scores at these classes.
at::Tensor finds(const std::vector<std::int64_t>& classes) {
  return at::one_hot(torch::tensor(classes), 3).to(at::kFloat);
}

using Scores = std::array<double, 3>;

Scores scores_of(const at::Tensor& output, const at::Tensor& target, ga::Average average,
                 std::optional<ga::Task> task = {}) {
  return {filled(ga::Precision{.task = task, .average = average}, output, target).value(),
          filled(ga::Recall{.task = task, .average = average}, output, target).value(),
          filled(ga::F1{.task = task, .average = average}, output, target).value()};
}

void check_scores(const Scores& found, const Scores& expected) {
  for (std::size_t i = 0; i < 3; ++i) CHECK(found[i] == Approx(expected[i]));
}

}  // namespace

TEST_CASE("Precision, Recall, F1: of classes, with the values of scikit-learn's documentation") {
  const auto target = torch::tensor({0, 1, 2, 0, 1, 2}), output = finds({0, 2, 1, 0, 0, 1});
  check_scores(scores_of(output, target, ga::Average::macro), {2.0 / 9, 1.0 / 3, 4.0 / 15});
  check_scores(scores_of(output, target, ga::Average::micro), {1.0 / 3, 1.0 / 3, 1.0 / 3});
  check_scores(scores_of(output, target, ga::Average::weighted), {2.0 / 9, 1.0 / 3, 4.0 / 15});
  // 2 is neither found nor wanted; 0 is wanted three times, and found twice correctly and once wrongly.
  const auto two = torch::tensor({0, 0, 0, 1, 1, -100});
  check_scores(scores_of(finds({0, 0, 1, 0, 1, 2}), two, ga::Average::macro),
               {(2.0 / 3 + 0.5) / 2, (2.0 / 3 + 0.5) / 2, (2.0 / 3 + 0.5) / 2});
  check_scores(scores_of(finds({0, 0, 1, 0, 1, 2}), two, ga::Average::weighted), {0.6, 0.6, 0.6});
}

TEST_CASE("Precision, Recall, F1: of binary targets, and of labels") {
  const auto target = torch::tensor({1, 1, 1, 0, 0, -100});
  const auto scores = torch::tensor({1.0, 2.0, -1.0, 3.0, -1.0, 5.0});  // right: 2, found: 3, wanted: 3
  for (const auto average : {ga::Average::macro, ga::Average::micro, ga::Average::weighted}) {
    check_scores(scores_of(scores.unsqueeze(1), target, average), {2.0 / 3, 2.0 / 3, 2.0 / 3});
    check_scores(scores_of(scores.sub(1.5), target, average), {0.5, 1.0 / 3, 0.4});
    check_scores(scores_of(scores.sub(9), target, average), {0, 0, 0});  // no positives
  }
  const auto labels = torch::tensor({{0, 1, 0}, {1, 0, 1}, {1, 0, 0}, {1, 1, 0}});
  const auto found = torch::tensor({{0, 0, 1}, {1, 0, 1}, {0, 0, 0}, {1, 1, 0}}).mul(2).sub(1).to(at::kFloat);
  // Correct, found and wanted per label: 2, 2, 3; 1, 1, 2; 1, 2, 1.
  const auto task = ga::Task::multilabel;
  check_scores(scores_of(found, labels, ga::Average::macro, task),
               {(1 + 1 + 0.5) / 3, (2.0 / 3 + 0.5 + 1) / 3, (0.8 + 2.0 / 3 + 2.0 / 3) / 3});
  check_scores(scores_of(found, labels, ga::Average::micro, task), {0.8, 4.0 / 6, 8.0 / 11});
  check_scores(scores_of(found, labels, ga::Average::weighted, task),
               {(3 + 2 + 0.5) / 6, 4.0 / 6, (3 * 0.8 + 2 * 2.0 / 3 + 2.0 / 3) / 6});
  CHECK(std::isnan(ga::F1{}.value()));
  REQUIRE_ERROR("F1: targets must be classes that the output has a score for",
                filled(ga::F1{}, finds({0, 1, 2, 0}), torch::tensor({0, 1, 3, 0})).value());
}

TEST_CASE("ConfusionMatrix: wanted and found, with the values of scikit-learn's and torchmetrics' documentation") {
  const auto of = [](std::vector<std::int64_t> numbers, std::vector<std::int64_t> shape) {
    return torch::tensor(numbers).reshape(shape);
  };
  const auto target = torch::tensor({2, 0, 2, 2, 0, 1});
  CHECK(at::equal(filled(ga::ConfusionMatrix{}, finds({0, 0, 2, 2, 0, 2}), target).value(),
                  of({2, 0, 0, 0, 0, 1, 1, 0, 2}, {3, 3})));
  CHECK(at::equal(filled(ga::ConfusionMatrix{.ignore_index = 2}, finds({0, 0, 2, 2, 0, 2}), target).value(),
                  of({2, 0, 0, 0, 0, 1, 0, 0, 0}, {3, 3})));
  const auto scores = torch::tensor({1.0, 2.0, -1.0, 3.0, -1.0, 5.0});
  CHECK(at::equal(filled(ga::ConfusionMatrix{}, scores, torch::tensor({1, 1, 1, 0, 0, 0})).value(),
                  of({1, 2, 1, 2}, {2, 2})));
  const auto found = torch::tensor({{0, 0, 1}, {1, 0, 1}}).mul(2).sub(1).to(at::kFloat);
  ga::ConfusionMatrix labels{.task = ga::Task::multilabel};
  labels.add(loss_with(found, torch::tensor({{0, 1, 0}, {1, 0, 1}})));
  CHECK(at::equal(labels.value(), of({1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1}, {3, 2, 2})));
  CHECK(ga::ConfusionMatrix{}.value().numel() == 0);
}

TEST_CASE("Metrics of classes: ranks together match one process, also if one has no batch") {
  torch::manual_seed(0);
  const auto output = torch::randn({7, 3}), target = torch::randint(3, {7}), labels = torch::randint(2, {7, 3});
  const auto on_ranks = [&](auto metric, const at::Tensor& targets,
                            const std::function<void(decltype(metric)&)>& check) {
    tests::as_ranks(3, [&](const ga::ProcessGroup& group) {
      auto own = metric;
      if (group.rank() == 0) own.add(loss_with(output.slice(0, 0, 2), targets.slice(0, 0, 2)));
      if (group.rank() == 2) own.add(loss_with(output.slice(0, 2), targets.slice(0, 2)));
      own.reduce([&](at::Tensor& part) { group.all_reduce(part); });
      check(own);
    });
  };
  std::atomic<int> checked = 0;
  const auto numbers = [&](auto metric, const at::Tensor& targets) {
    const auto whole = filled(metric, output, targets).value();
    on_ranks(metric, targets, [&, whole](auto& own) { checked += own.value() == whole; });
  };
  numbers(ga::Accuracy{}, target);
  numbers(ga::Precision{.average = ga::Average::weighted}, target);
  numbers(ga::Recall{}, target);
  numbers(ga::F1{}, target);
  numbers(ga::F1{.task = ga::Task::multilabel, .average = ga::Average::micro}, labels);
  CHECK(checked == 15);
  for (const auto task : {ga::Task::multiclass, ga::Task::multilabel}) {
    const auto& targets = task == ga::Task::multiclass ? target : labels;
    const auto whole = filled(ga::ConfusionMatrix{.task = task}, output, targets).value();
    on_ranks(ga::ConfusionMatrix{.task = task}, targets, [&](auto& own) { checked += at::equal(own.value(), whole); });
  }
  CHECK(checked == 21);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    ga::F1 own;
    own.reduce([&](at::Tensor& part) { group.all_reduce(part); });
    checked += std::isnan(own.value());
  });
  CHECK(checked == 23);
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
  void reset() { asked = 0; }
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
/// A metric that changes a tensor in place, which copies share.
struct InPlace {
  std::string_view name = "in_place";
  at::Tensor count = torch::zeros({}, at::kDouble);
  void add(const ga::Loss&) { count += 1; }
  double value() const { return count.item<double>(); }
};
struct InPlaceWithReset : InPlace {
  void reset() { count.zero_(); }
};
struct Renamed : ga::Accuracy {
  static constexpr std::string_view name = "renamed";
};
struct NoNumber {
  static constexpr std::string_view name = "no_number";
  void add(const ga::Loss&) {}
  std::string value() const { return ""; }
};

}  // namespace

TEST_CASE("metric: which types are metrics, and which are not") {
  STATIC_REQUIRE(ga::metric<ga::MeanLoss>);
  STATIC_REQUIRE(ga::metric<ga::Accuracy>);
  STATIC_REQUIRE(ga::metric<Largest>);
  STATIC_REQUIRE(ga::metric<Named>);
  STATIC_REQUIRE(ga::metric<ga::F1>);
  STATIC_REQUIRE(ga::metric<ga::ConfusionMatrix>);
  STATIC_REQUIRE(ga::metric<ga::Predictions>);
  STATIC_REQUIRE(ga::metric<Renamed>);
  STATIC_REQUIRE_FALSE(ga::metric<NoName>);
  STATIC_REQUIRE_FALSE(ga::metric<NoAdd>);
  STATIC_REQUIRE_FALSE(ga::metric<NoNumber>);
  STATIC_REQUIRE_FALSE(ga::metric<double>);
}

TEST_CASE("Evaluator: the mean loss, and the requested metrics") {
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

TEST_CASE("Evaluator: each evaluation begins with a copy of the given metric") {
  const auto evaluate = [](const auto& metric) {
    inner::Evaluator evaluator(metric);
    for (int i = 0; i < 2; ++i) evaluator.add(ga::Loss{torch::tensor(1.0), 1}, 1);
    return evaluator.result()[metric.name];
  };
  const Largest given{.largest = 7};
  const InPlaceWithReset resettable;
  for (int i = 0; i < 3; ++i) {
    CHECK(evaluate(given) == 7);
    CHECK(evaluate(resettable) == 2);
  }
  STATIC_REQUIRE_FALSE(inner::resettable<InPlace>);  // refused by is_metric, see tests/compile_fail
  STATIC_REQUIRE_FALSE(std::is_trivially_copyable_v<InPlace>);
  CHECK(inner::mode_told_by(ga::F1{}) == ga::Mode::max);
  CHECK(inner::mode_told_by(ga::MeanLoss{}) == ga::Mode::min);
  CHECK_FALSE(inner::mode_told_by(given));
}

TEST_CASE("Evaluator: a metric may be a tensor") {
  inner::Evaluator evaluator(ga::ConfusionMatrix{}, Renamed{});
  evaluator.add(ga::Loss{torch::tensor(1.0), 4}.with(logits, torch::tensor({0, 1, 2, 1})), 4);
  const auto result = evaluator.result();
  CHECK(at::equal(result.tensors.at("confusion_matrix"), torch::tensor({{1, 0, 0}, {1, 1, 0}, {0, 0, 1}})));
  CHECK(result.metrics.size() == 2);
  CHECK(result["renamed"] == 0.75);
}

TEST_CASE("Predictions: the outputs of all batches, in their order") {
  inner::Evaluator evaluator(ga::Predictions{});
  CHECK(evaluator.result().tensors.at("predictions").numel() == 0);
  const auto output = torch::randn({6, 2}).set_requires_grad(true);
  for (const auto& [from, to] : {std::pair(0, 4), std::pair(4, 6)})
    evaluator.add(ga::Loss{output.sum(), to - from}.with(output.slice(0, from, to), torch::tensor({0})), to - from);
  const auto predictions = evaluator.result().tensors.at("predictions");
  CHECK(at::equal(predictions, output));
  CHECK_FALSE(predictions.requires_grad());
  CHECK_FALSE(predictions.is_alias_of(output));
  REQUIRE_ERROR("got a 0-dim tensor", evaluator.add(ga::Loss{torch::tensor(1.0), 1}.with(torch::tensor(1.0), {}), 1));
  REQUIRE_ERROR("Predictions: needs outputs", evaluator.add(ga::Loss{torch::tensor(1.0), 1}, 1));
}

TEST_CASE("Evaluator: two metrics of one name are refused") {
  REQUIRE_ERROR("got 'accuracy' twice", inner::Evaluator(ga::Accuracy{}, ga::Accuracy{.dim = -1}));
  REQUIRE_ERROR("got 'loss' twice", inner::Evaluator(Named{"loss"}));
}

TEST_CASE("Evaluation: prints its metrics with six digits, with any format flags of the stream") {
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
  REQUIRE_ERROR("Evaluation: has no metric 'f1'; pass it to evaluate()", evaluation["f1"]);
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

TEST_CASE("Metrics of classes: on a device as on the host", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto target = torch::tensor({0, 1, 2, 0, 1, 2}), output = finds({0, 2, 1, 0, 0, 1});
  check_scores(scores_of(output.cuda(), target.cuda(), ga::Average::macro), {2.0 / 9, 1.0 / 3, 4.0 / 15});
  const auto matrix = filled(ga::ConfusionMatrix{}, output, target).value();
  CHECK(at::equal(filled(ga::ConfusionMatrix{}, output.cuda(), target.cuda()).value(), matrix));
}
