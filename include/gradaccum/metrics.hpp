// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/weighted_mean.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace gradaccum {

/// Adds up what the losses of an evaluation say, and gives one number.
///
///     struct LargestLoss {
///       std::string_view name = "largest_loss";          // or static
///       double largest = 0;
///       void add(const ga::Loss& loss) { largest = std::max(largest, loss.mean.item<double>()); }
///       double value() const { return largest; }
///     };
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     std::cout << trainer.evaluate(batches, LargestLoss{})["largest_loss"] << '\n';
template <class M>
concept metric = requires(M& metric, const Loss& loss) {
  { M::name } -> std::convertible_to<std::string_view>;
  metric.add(loss);
  { metric.value() } -> std::convertible_to<double>;
};

/// The mean loss over all items: each loss counts with the items that it is the mean of.
///
/// @note `value()` waits for the device.
class MeanLoss {
 public:
  static constexpr std::string_view name = "loss";

  void add(const Loss& loss) {
    mean_.add(loss.mean, loss.items);
    items_ += loss.items;
  }
  double value() const { return mean_.value().item<double>(); }
  double items() const { return items_; }

 private:
  detail::WeightedMean mean_;
  double items_ = 0;
};

/// The share of targets that have the highest of their outputs, in [0, 1].
///
/// `output` [N, C, …] and `target` [N, …], int64, as of cross entropy; targets of `ignore_index` do not count. Where
/// the classes lie in another dimension of the output, say in the last, `dim` names it. The objective returns
/// `ga::Loss{mean, items}.with(output, target)`.
///
/// @note `value()` waits for the device; `add` does not.
struct Accuracy {
  static constexpr std::string_view name = "accuracy";

  std::int64_t dim = 1;
  std::int64_t ignore_index = -100;
  at::Tensor right = {}, counted = {};  ///< so far: 0-dim int64, on the device

  void add(const Loss& loss);
  double value() const {
    return right.defined() ? right.item<double>() / counted.item<double>() : std::numeric_limits<double>::quiet_NaN();
  }
};

inline void Accuracy::add(const Loss& loss) {
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

/// What an evaluation has found. Printed, with six digits: `accuracy: 0.784000, loss: 0.625000`.
struct Evaluation {
  std::map<std::string, double, std::less<>> metrics = {};  ///< by name; "loss" is always there
  double items = 0;                                         ///< sum of the weights of the losses
  std::int64_t samples = 0;
  double seconds = 0;

  double operator[](std::string_view name) const {
    const auto found = metrics.find(name);
    TORCH_CHECK(found != metrics.end(), "Evaluation: has no metric '", std::string(name), "'; pass one to evaluate()");
    return found->second;
  }
};

inline std::ostream& operator<<(std::ostream& stream, const Evaluation& evaluation) {
  const char* separator = "";
  for (auto& [name, value] : evaluation.metrics)
    stream << fmt::format("{}{}: {:#.6g}", std::exchange(separator, ", "), name, value);
  return stream;
}

namespace detail {

/// Collects what `Trainer::evaluate` gives.
template <metric... Metrics>
class Evaluator {
 public:
  explicit Evaluator(Metrics... metrics) : metrics_(std::move(metrics)...) {
    std::set<std::string> names{std::string(MeanLoss::name)};
    const auto check = [&](auto& metric) {
      const bool is_new = names.emplace(metric.name).second;
      TORCH_CHECK(is_new, "Trainer: evaluate() must get metrics of different names, other than \"loss\", got two '",
                  std::string(metric.name), "'");
    };
    std::apply([&](auto&... metric) { (check(metric), ...); }, metrics_);
  }

  void add(const Loss& loss, std::int64_t samples) {
    loss.check_shape();
    Window::check_weight(loss.items);
    loss_.add(loss);
    std::apply([&](auto&... metric) { (metric.add(loss), ...); }, metrics_);
    samples_ += samples;
  }
  Evaluation result() {
    Evaluation result{.items = loss_.items(), .samples = samples_};
    result.metrics[std::string(MeanLoss::name)] = loss_.value();
    const auto add = [&](auto& metric) { result.metrics[std::string(metric.name)] = metric.value(); };
    std::apply([&](auto&... metric) { (add(metric), ...); }, metrics_);
    result.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    return result;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::tuple<Metrics...> metrics_;
  MeanLoss loss_;
  std::int64_t samples_ = 0;
  Clock::time_point start_ = Clock::now();
};

}  // namespace detail
}  // namespace gradaccum
