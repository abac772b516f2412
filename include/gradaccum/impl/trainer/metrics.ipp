// SPDX-License-Identifier: Apache-2.0
// Weighted means of losses and metrics over micro-batches and processes.
#pragma once

#include <gradaccum/metrics.hpp>

#include <gradaccum/archive.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
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
  auto all = at::zeros({3}, at::kDouble);
  auto* const numbers = all.mutable_data_ptr<double>();
  numbers[0] = weight > 0 ? weight * value() : 0, numbers[1] = weight, numbers[2] = items_;
  sum(all);
  const auto* const sums = all.const_data_ptr<double>();
  mean_ = {};
  if (sums[1] > 0) mean_.add(sums[0] / sums[1], sums[1]);
  items_ = sums[2];
}

GRADACCUM_INLINE void Accuracy::add(const Loss& loss) {
  const auto &output = loss.output, &target = loss.target;
  TORCH_CHECK(
      output.defined() && target.defined(),
      "Accuracy: needs the model's output and the target; return ga::Loss{mean, items}.with(output, target) from "
      "the objective");
  TORCH_CHECK(-output.dim() <= dim && dim < output.dim(), "Accuracy: dim must be one of the output, of shape ",
              output.sizes(), ", got ", dim);
  at::NoGradGuard no_grad;
  const auto found = output.argmax(dim);
  TORCH_CHECK(found.sizes() == target.sizes(), "Accuracy: an output of shape ", output.sizes(), " with classes in dim ",
              dim, " needs a target of shape ", found.sizes(), ", got ", target.sizes());
  const auto counts = target.ne(ignore_index);
  const auto right_here = found.eq(target).logical_and(counts).sum(), counted_here = counts.sum();
  right = right.defined() ? right.add(right_here) : right_here;
  counted = counted.defined() ? counted.add(counted_here) : counted_here;
}

GRADACCUM_INLINE double Accuracy::value() const {
  return right.defined() ? right.item<double>() / counted.item<double>() : std::numeric_limits<double>::quiet_NaN();
}

GRADACCUM_INLINE void Accuracy::reduce(SumOfRanks sum) {
  const auto own = [](const at::Tensor& count) { return count.defined() ? count.cpu() : at::zeros({}, at::kLong); };
  right = own(right), counted = own(counted);
  sum(right);
  sum(counted);
}

GRADACCUM_INLINE double Evaluation::operator[](std::string_view name) const {
  const auto found = metrics.find(name);
  TORCH_CHECK(found != metrics.end(), "Evaluation: has no metric '", std::string(name), "'; pass one to evaluate()");
  return found->second;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const Evaluation& evaluation) {
  const char* separator = "";
  for (auto& [name, value] : evaluation.metrics)
    stream << fmt::format("{}{}: {:#.6g}", std::exchange(separator, ", "), name, value);
  return stream;
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
}

namespace detail {

GRADACCUM_INLINE void Evaluator::check_names() const {
  std::set<std::string> names{std::string(MeanLoss::name)};
  for (auto& metric : metrics_)
    TORCH_CHECK(names.insert(metric->name()).second,
                "Trainer: evaluate() must get metrics of different names, other than \"loss\", got two '",
                metric->name(), "'");
}

GRADACCUM_INLINE void Evaluator::add(const Loss& loss, std::int64_t samples) {
  loss.check_shape();
  Window::check_weight(loss.items);
  loss_.add(loss);
  for (auto& metric : metrics_) metric->add(loss);
  samples_ += samples;
}

GRADACCUM_INLINE void cannot_be_reduced(const std::string& metric) {
  TORCH_CHECK(false,
              "Trainer: a metric of several processes must have a member reduce(ga::SumOfRanks), as ga::Accuracy "
              "has, got '",
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
  for (auto& metric : metrics_) result.metrics[metric->name()] = metric->value();
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

GRADACCUM_INLINE Mode mode_of(const char* owner, std::string_view metric, std::optional<Mode> given) {
  if (given) return *given;
  const auto name = metric.substr(metric.rfind('/') + 1);  // npos + 1 is 0
  TORCH_CHECK(name == "loss" || name == "accuracy", owner, ": mode must say whether a lower or a higher '",
              std::string(metric), "' is better: ga::Mode::min or ga::Mode::max");
  return name == "loss" ? Mode::min : Mode::max;
}

GRADACCUM_INLINE bool is_better(Mode mode, double number, double than, double min_delta) {
  if (std::isnan(number) || std::isnan(than)) return !std::isnan(number);
  return mode == Mode::min ? number < than - min_delta : number > than + min_delta;
}

GRADACCUM_INLINE void check_is_validated(const char* owner, const std::string& metric,
                                         const std::vector<std::string>& validated) {
  const bool known = std::any_of(validated.begin(), validated.end(), [&](const std::string& name) {
    return name == metric || name == "validation/" + metric;
  });
  TORCH_CHECK(known, owner, ": metric must be a number that a ga::Validate of this trainer finds, one of [",
              fmt::format("{}", fmt::join(validated, ", ")), "], got '", metric, "'");
}

}  // namespace detail
}  // namespace gradaccum

#undef GRADACCUM_INLINE
