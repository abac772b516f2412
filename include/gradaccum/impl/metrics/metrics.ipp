// SPDX-License-Identifier: Apache-2.0
// Computes weighted means of losses and metrics over micro-batches and ranks.
#pragma once

#include <gradaccum/metrics.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/window/window.hpp>
#include <gradaccum/progress_line.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void detail::WeightedMean::add(const at::Tensor& mean, double weight) {
  if (weight == 0) return;  // a mean over nothing is often NaN
  if (mean.device().is_cpu()) return add(mean.item<double>(), weight);
  const auto part = mean.detach().to(at::kDouble).mul(weight);
  device_sum_ = device_sum_.defined() ? device_sum_.add(part.to(device_sum_.device())) : part;
  weight_ += weight;
}

GRADACCUM_INLINE at::Tensor detail::WeightedMean::value() const {
  if (weight_ == 0) return at::scalar_tensor(std::numeric_limits<double>::quiet_NaN(), at::kDouble);  // 0 / 0 is -nan
  if (!device_sum_.defined()) return at::scalar_tensor(host_sum_ / weight_, at::kDouble);
  return device_sum_.add(host_sum_).div(weight_).reshape({});
}

GRADACCUM_INLINE void detail::WeightedMean::state(Archive& archive) {
  archive("weight", weight_);
  archive("sum", host_sum_);
  auto on_device = device_sum_.defined() ? std::optional(device_sum_) : std::nullopt;
  archive("sum_on_device", on_device);
  device_sum_ = on_device.value_or(at::Tensor());
}

/// A rank without data has no mean and contributes 0.
GRADACCUM_INLINE void MeanLoss::reduce(SumOfRanks sum) {
  const double weight = mean_.weight();
  auto all = at::tensor({weight > 0 ? weight * value() : 0, weight, items_}, at::kDouble);
  sum(all);
  const auto* const sums = all.const_data_ptr<double>();
  mean_ = {};
  if (sums[1] > 0) mean_.add(sums[0] / sums[1], sums[1]);
  items_ = sums[2];
}

namespace detail {

/// Predictions and targets: classes, or booleans of shape [targets, labels].
struct Decisions {
  at::Tensor found, wanted, counts, right, impossible;
  std::int64_t classes = 0;  // or labels
  bool of_labels = false;

  /// Sums the weights of targets by class, or by label.
  at::Tensor count(const at::Tensor& which, const at::Tensor& weights) const {
    if (of_labels) return which.logical_and(weights).sum(0);
    return at::zeros({classes}, which.options()).scatter_add_(0, which.flatten(), weights.flatten().to(at::kLong));
  }
};

GRADACCUM_INLINE Decisions decide(const ClassesOf& of, const Loss& loss) {
  const at::NoGradGuard no_grad;
  const auto &output = loss.output, &given = loss.target;
  TORCH_CHECK(output.defined() && given.defined(), of.metric,
              ": needs the model's output and the target; return ga::Loss{mean, items}.with(output, target) from the "
              "objective");
  const bool has_classes = -output.dim() <= of.dim && of.dim < output.dim();
  const bool same = output.squeeze().sizes() == given.squeeze().sizes();
  Decisions they;
  they.classes = has_classes ? output.size(of.dim) : 1;
  TORCH_CHECK(of.task || !same || they.classes == 1, of.metric,
              ": task must be given for a target of the output's shape ", output.sizes(),
              ": ga::Task::multilabel, ga::Task::multiclass if it holds probabilities of the classes, or "
              "ga::Task::binary if dim ",
              of.dim, " is not of labels or classes");
  const auto task = of.task.value_or(they.classes > 1 ? Task::multiclass : Task::binary);
  TORCH_CHECK(task == Task::binary || they.classes > 1, of.metric, ": needs an output with several classes in dim ",
              of.dim, " for this task, got one of shape ", output.sizes());
  TORCH_CHECK(task == Task::multiclass || same, of.metric, ": an output of shape ", output.sizes(),
              " with one score for each target needs a target of that shape, got ", given.sizes());
  const auto target = given.is_floating_point() ? given : given.to(at::kLong);  // bool and uint8 cannot hold -100
  if (task != Task::multiclass) {
    they.of_labels = true;
    if (task == Task::binary) they.classes = 1;
    const auto rows = [&](const at::Tensor& each) {
      return (task == Task::binary ? each : each.movedim(of.dim, -1)).reshape({-1, they.classes});
    };
    const auto scores = rows(output), targets = rows(target.reshape(output.sizes()));
    they.found = scores.gt(of.threshold), they.wanted = targets.gt(0.5), they.counts = targets.ne(of.ignore_index);
    they.impossible = targets.lt(0).logical_or(targets.gt(1)).logical_and(they.counts);
    they.right = they.found.eq(they.wanted).logical_and(scores.eq(scores)).logical_and(they.counts);
    return they;
  }
  const auto [highest, found] = output.max(of.dim);
  const bool is_kept = !same && target.dim() == output.dim() && target.size(of.dim) == 1;
  const auto classes = same      ? target.reshape(output.sizes()).to(at::kDouble).argmax(of.dim)
                       : is_kept ? target.squeeze(of.dim)
                                 : target;
  TORCH_CHECK(found.sizes() == classes.sizes(), of.metric, ": an output of shape ", output.sizes(),
              " with classes in dim ", of.dim, " needs a target of shape ", found.sizes(), ", got ", given.sizes());
  TORCH_CHECK(!classes.is_floating_point(), of.metric, ": a target of classes must have integers, got ",
              classes.scalar_type(), "; convert it with .to(torch::kLong)");
  they.counts = classes.ne(of.ignore_index);
  they.impossible = classes.lt(0).logical_or(classes.ge(they.classes)).logical_and(they.counts);
  they.found = found, they.wanted = classes.clamp(0, they.classes - 1);
  they.right = found.eq(classes).logical_and(highest.eq(highest)).logical_and(they.counts);  // a NaN is not itself
  return they;
}

GRADACCUM_INLINE void check_possible(std::string_view metric, const at::Tensor& impossible) {
  TORCH_CHECK(impossible.item<std::int64_t>() == 0, metric,
              ": targets must be classes that the output has a score for, or from 0 to 1 if each has a score, got ",
              impossible.item<std::int64_t>(), " others; exclude them with ignore_index");
}

GRADACCUM_INLINE void add_to(at::Tensor& sum, const at::Tensor& part) { sum = sum.defined() ? sum.add(part) : part; }

GRADACCUM_INLINE void add_scores(const ClassesOf& of, const Loss& loss, at::Tensor& counts) {
  const auto they = decide(of, loss);
  const auto right = they.of_labels ? they.right.logical_and(they.wanted) : they.right;
  add_to(counts, at::cat({they.count(they.wanted, right), they.count(they.found, they.counts),
                          they.count(they.wanted, they.counts), they.impossible.sum().reshape(1)}));
}

GRADACCUM_INLINE void add_confusion(const ClassesOf& of, const Loss& loss, at::Tensor& counts) {
  const auto they = decide(of, loss);
  const auto size = they.of_labels ? 2 : they.classes, matrices = they.of_labels ? they.classes : 1;
  auto place = they.wanted.to(at::kLong).mul(size).add(they.found);
  if (they.of_labels) place = place.add(at::arange(matrices, place.options()).mul(4));
  const auto sums = at::zeros({matrices * size * size}, place.options());
  sums.scatter_add_(0, place.flatten(), they.counts.flatten().to(at::kLong));
  add_to(counts, at::cat({sums, they.impossible.sum().reshape(1)}));
}

GRADACCUM_INLINE double class_score(const ClassesOf& of, const at::Tensor& counts, Score score, Average average) {
  if (!counts.defined()) return std::numeric_limits<double>::quiet_NaN();
  const auto all = counts.cpu();
  check_possible(of.metric, all[-1]);
  auto by_class = all.slice(0, 0, -1).reshape({3, -1}).to(at::kDouble);
  const bool binary = by_class.size(1) == 1, all_count = binary || of.task == Task::multilabel;
  if (average == Average::micro) by_class = by_class.sum(1, /*keepdim=*/true);
  const auto right = by_class[0], found = by_class[1], wanted = by_class[2], either = found.add(wanted);
  const auto of_what = score == Score::precision ? found : score == Score::recall ? wanted : either.div(2);
  const auto weights = average == Average::weighted && !binary ? wanted
                       : all_count                             ? at::ones_like(found)
                                                               : either.gt(0);
  return right.div(of_what).nan_to_num(0).mul(weights).sum().div(weights.sum()).nan_to_num(0).item<double>();
}

/// Sums the counts of all ranks. A rank without batches does not know the number of classes, and learns it here.
GRADACCUM_INLINE void reduce_counts(std::string_view metric, at::Tensor& counts, SumOfRanks sum) {
  const auto size = counts.defined() ? static_cast<double>(counts.numel()) : 0;
  auto sizes = at::tensor({size, size * size, size > 0 ? 1.0 : 0.0}, at::kDouble);
  sum(sizes);
  const auto* const all = sizes.const_data_ptr<double>();
  TORCH_CHECK(all[0] * all[0] == all[1] * all[2], metric, ": the number of classes must be the same on all ranks");
  if (all[2] == 0) return;
  counts = counts.defined() ? counts.cpu() : at::zeros({static_cast<std::int64_t>(all[0] / all[2])}, at::kLong);
  sum(counts);
}

}  // namespace detail

GRADACCUM_INLINE void Accuracy::add(const Loss& loss) {
  const auto they = detail::decide({"Accuracy", dim, ignore_index, task, threshold}, loss);
  detail::add_to(right, they.right.sum());
  detail::add_to(counted, they.counts.sum());
  detail::add_to(impossible, they.impossible.sum());
}

GRADACCUM_INLINE double Accuracy::value() const {
  if (!right.defined()) return std::numeric_limits<double>::quiet_NaN();
  if (impossible.defined()) detail::check_possible("Accuracy", impossible);
  const auto all = counted.item<double>();
  return all > 0 ? right.item<double>() / all : std::numeric_limits<double>::quiet_NaN();
}

GRADACCUM_INLINE void Accuracy::reduce(SumOfRanks sum) {
  for (auto* const count : {&right, &counted, &impossible}) {
    *count = count->defined() ? count->cpu() : at::zeros({}, at::kLong);
    sum(*count);
  }
}

GRADACCUM_INLINE void Predictions::add(const Loss& loss) {
  TORCH_CHECK(loss.output.defined(), "Predictions: needs outputs; return ga::Loss{mean, items}.with(output, target)");
  TORCH_CHECK(loss.output.dim() > 0, "Predictions: an output must have a row for each sample, got a 0-dim tensor");
  outputs_.push_back(loss.output.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
}

GRADACCUM_INLINE at::Tensor Predictions::value() const { return outputs_.empty() ? at::empty({0}) : at::cat(outputs_); }

GRADACCUM_INLINE void ConfusionMatrix::add(const Loss& loss) {
  detail::add_confusion({"ConfusionMatrix", dim, ignore_index, task, threshold}, loss, counts);
}

GRADACCUM_INLINE at::Tensor ConfusionMatrix::value() const {
  if (!counts.defined()) return at::zeros({0, 0}, at::kLong);
  const auto all = counts.cpu();
  detail::check_possible("ConfusionMatrix", all[-1]);
  const auto size = static_cast<std::int64_t>(std::sqrt(all.numel() - 1));
  using Shape = std::vector<std::int64_t>;
  return all.slice(0, 0, -1).reshape(task == Task::multilabel ? Shape{-1, 2, 2} : Shape{size, size});
}

GRADACCUM_INLINE void ConfusionMatrix::reduce(SumOfRanks sum) { detail::reduce_counts("ConfusionMatrix", counts, sum); }

GRADACCUM_INLINE double Evaluation::operator[](std::string_view name) const {
  const auto found = metrics.find(name);
  TORCH_CHECK(found != metrics.end(), "Evaluation: has no metric '", std::string(name), "'; pass it to evaluate()");
  return found->second;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const Evaluation& evaluation) {
  const char* separator = "";
  for (auto& [name, value] : evaluation.metrics)
    stream << std::exchange(separator, ", ") << name << detail::number_text(": %#.6g", value);
  const auto loss = evaluation.metrics.find(MeanLoss::name);
  const bool of_nothing = evaluation.samples == 0 && loss != evaluation.metrics.end() && detail::is_nan(loss->second);
  return of_nothing ? stream << " (of no samples)" : stream;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const Validation& validation) {
  return stream << validation.name << " at update " << validation.update << ": " << validation.found;
}

GRADACCUM_INLINE std::optional<double> Validation::operator[](std::string_view metric) const {
  if (const auto prefix = name + '/'; metric.starts_with(prefix))
    metric.remove_prefix(prefix.size());
  else if (name != "validation")
    return {};
  const auto number = found.metrics.find(metric);
  return number == found.metrics.end() ? std::nullopt : std::optional(number->second);
}

GRADACCUM_INLINE void Validation::state(Archive& archive) {
  archive("name", name);
  archive("update", update);
  archive("epoch", epoch);
  archive("samples", samples);
  archive("seconds", seconds);
  archive("items", found.items);
  archive("samples_found", found.samples);
  archive("seconds_found", found.seconds);
  auto metrics = std::vector(found.metrics.begin(), found.metrics.end());
  auto number = static_cast<std::int64_t>(metrics.size());
  archive("metrics", number);
  found.metrics.clear();
  for (std::int64_t i = 0; i < number; ++i) {  // no reserve(): `number` is untrusted; a missing entry throws
    std::pair<std::string, double> metric;
    if (!archive.loading()) metric = metrics[static_cast<std::size_t>(i)];
    archive(fmt::format("metric{}", i), metric.first);
    archive(fmt::format("value{}", i), metric.second);
    found.metrics.insert(std::move(metric));
  }
  archive("tensors", detail::OwnTensors{found.tensors});
  std::optional<bool> at_end;  // absent from older states
  if (!archive.loading() && !due) at_end = true;
  archive("at_end", at_end);
  due = !at_end.value_or(false);
}

namespace detail {

GRADACCUM_INLINE void Evaluator::check_names() const {
  std::set<std::string> names{std::string(MeanLoss::name)};
  for (auto& metric : metrics_)
    TORCH_CHECK(names.insert(metric->name()).second,
                "Trainer: evaluate() must get metrics with different names, other than \"loss\", got '", metric->name(),
                "' twice");
}

GRADACCUM_INLINE void Evaluator::add(const Loss& loss, std::int64_t samples) {
  loss.check_shape();
  Window::check_weight(loss.items);
  loss_.add(loss);
  for (auto& metric : metrics_) metric->add(loss);
  samples_ += samples;
}

GRADACCUM_INLINE void cannot_be_reduced(const std::string& metric) {
  TORCH_CHECK(
      false,
      "Trainer: with several processes, a metric must have a member reduce(ga::SumOfRanks), as ga::Accuracy has, got '",
      metric, "' without one");
}

GRADACCUM_INLINE void Evaluator::reduce(SumOfRanks sum) {
  loss_.reduce(sum);
  for (auto& metric : metrics_) metric->reduce(sum);
  auto samples = at::full({}, samples_, at::kLong);
  sum(samples);
  samples_ = samples.item<std::int64_t>();
}

GRADACCUM_INLINE Evaluation Evaluator::result() {
  Evaluation result{.items = loss_.items(), .samples = samples_};
  result.metrics[std::string(MeanLoss::name)] = loss_.value();
  for (auto& metric : metrics_) metric->tell(result);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return result;
}

GRADACCUM_INLINE void ValidationHistory::state(Archive& archive) {
  auto number = all.empty() ? std::nullopt : std::optional(static_cast<std::int64_t>(all.size()));
  archive("number", number);
  std::vector<Validation> archived;
  for (std::int64_t i = 0; i < number.value_or(0); ++i) {
    archived.push_back(archive.loading() ? Validation() : all[static_cast<std::size_t>(i)]);
    archive(fmt::format("{}", i), archived.back());
  }
  all = std::move(archived);
}

GRADACCUM_INLINE void OwnTensors::state(Archive& archive) {
  archive.tensors(all);
  if (!archive.loading()) return;
  for (auto& [name, tensor] : all) tensor = tensor.clone();
}

GRADACCUM_INLINE Mode mode_of(const char* owner, std::string_view metric, std::optional<Mode> given,
                              const MetricModes* validated) {
  if (validated) {
    std::vector<std::string> names;
    for (auto& [name, told] : *validated) names.push_back(name);
    auto found = validated->find(metric);
    if (found == validated->end()) found = validated->find("validation/" + std::string(metric));
    TORCH_CHECK(!names.empty(), owner, ": needs a ga::Validate beside it, which computes '", metric, "'");
    TORCH_CHECK(found != validated->end(), owner,
                ": metric must be one that a ga::Validate of this trainer computes, one of [", c10::Join(", ", names),
                "], got '", metric, "'");
    const auto told = found->second;
    TORCH_CHECK(!told || !given || *told == *given, owner,
                ": mode must be ga::Mode::", told == Mode::max ? "max" : "min", " for '", metric,
                "', as its higher_is_better says, or be left out");
    if (told) return *told;
  }
  if (given) return *given;
  const auto name = metric.substr(metric.rfind('/') + 1);  // npos + 1 is 0
  TORCH_CHECK(name == "loss" || name == "accuracy", owner, ": mode must be ga::Mode::min or ga::Mode::max for '",
              metric, "'; or give its metric a static constexpr bool higher_is_better");
  return name == "loss" ? Mode::min : Mode::max;
}

GRADACCUM_INLINE bool is_better(Mode mode, double number, double than, double min_delta) {
  if (detail::is_nan(number) || detail::is_nan(than)) return !detail::is_nan(number);
  return mode == Mode::min ? number < than - min_delta : number > than + min_delta;
}

GRADACCUM_INLINE void warn_if_last(const char* owner, const std::string& metric, Mode mode, double best) {
  if (best == (mode == Mode::min ? -1 : 1) * std::numeric_limits<double>::infinity())
    TORCH_WARN(owner, ": ", metric, " is ", best, ", so no later number can be better; look for a division by 0 in it");
}

}  // namespace detail
}  // namespace gradaccum

#undef GRADACCUM_INLINE
