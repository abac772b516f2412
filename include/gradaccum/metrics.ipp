// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/metrics.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <chrono>
#include <limits>
#include <ostream>
#include <set>

namespace gradaccum {

GRADACCUM_INLINE void MeanLoss::add(const Loss& loss) {
  mean_.add(loss.mean, loss.items);
  items_ += loss.items;
}

GRADACCUM_INLINE double MeanLoss::value() const { return mean_.value().item<double>(); }

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

namespace detail {

GRADACCUM_INLINE std::int64_t steady_nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

GRADACCUM_INLINE void Evaluator::begin() {
  std::set<std::string> names{std::string(MeanLoss::name)};
  for (auto& metric : metrics_) {
    const bool is_new = names.insert(metric->name()).second;
    TORCH_CHECK(is_new, "Trainer: evaluate() must get metrics of different names, other than \"loss\", got two '",
                metric->name(), "'");
  }
  start_ = steady_nanoseconds();
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
  result.seconds = static_cast<double>(steady_nanoseconds() - start_) / 1e9;
  return result;
}

}  // namespace detail
}  // namespace gradaccum
