// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradaccum {

class Archive;

namespace detail {

/// The mean of numbers that are means themselves, each over `weight` items, in float64. Numbers on a device are summed
/// there, without waiting.
class WeightedMean {
 public:
  void add(const at::Tensor& mean, double weight);
  void add(double mean, double weight) {
    host_sum_ += weight * mean;
    weight_ += weight;
  }
  double weight() const { return weight_; }
  /// 0-dim float64, on the device of the numbers; NaN if there are none.
  at::Tensor value() const;
  void state(Archive& archive);

 private:
  double weight_ = 0, host_sum_ = 0;
  at::Tensor device_sum_;
};

}  // namespace detail

/// Reduces the losses of an evaluation to one number.
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

/// Replaces a tensor by its sum over all ranks. If several processes share an evaluation, a metric needs a member to
/// sum its tensors, as in `void reduce(ga::SumOfRanks sum) { sum(right); }`; all ranks make the same calls.
using SumOfRanks = c10::function_ref<void(at::Tensor&)>;

/// The mean loss over all items; each loss is weighted by its number of items.
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
  void reduce(SumOfRanks sum);

 private:
  detail::WeightedMean mean_;
  double items_ = 0;
};

/// The fraction of targets whose class has the highest output, in [0, 1].
///
/// `output` is [N, C, …] and `target` [N, …], int64, as for cross entropy; targets equal to `ignore_index` are
/// excluded. If the classes are in another dimension of the output, such as the last, set `dim`. The objective returns
/// `ga::Loss{mean, items}.with(output, target)`.
///
/// @note `value()` waits for the device; `add` does not.
struct Accuracy {
  static constexpr std::string_view name = "accuracy";

  std::int64_t dim = 1;
  std::int64_t ignore_index = -100;
  at::Tensor right = {}, counted = {};  ///< counts so far: 0-dim int64, on the device

  void add(const Loss& loss);
  double value() const;
  void reduce(SumOfRanks sum);
};

/// The result of an evaluation. Prints with six digits: `accuracy: 0.784000, loss: 0.625000`.
struct Evaluation {
  std::map<std::string, double, std::less<>> metrics = {};  ///< by name; always includes "loss"
  double items = 0;                                         ///< sum of the losses' weights
  std::int64_t samples = 0;
  double seconds = 0;

  double operator[](std::string_view name) const;
};

std::ostream& operator<<(std::ostream& stream, const Evaluation& evaluation);

/// A validation during training and its position. `Validate` passes it to every policy that has `on_validation`.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     auto report = trainer.fit(batches);
///     for (const ga::Validation& validation : report.validations)
///       std::cout << validation.update << ": " << validation["loss"].value() << '\n';
struct Validation {
  std::string name = "validation";  ///< the name of its `Validate`
  std::int64_t update = 0;          ///< the trainer's updates so far
  std::int64_t epoch = 0;           ///< counted from 0
  std::int64_t samples = 0;         ///< samples that this `fit` has trained on
  double seconds = 0;               ///< duration of this `fit` so far
  Evaluation found = {};

  /// Looks up a number: by its own name, `loss`, if this validation is named "validation", or by both names,
  /// `test/loss`. Returns nullopt if it does not exist.
  std::optional<double> operator[](std::string_view metric) const;

 private:
  friend class Archive;
  void state(Archive& archive);
};

/// The direction in which a metric improves, in Python's terms.
enum class Mode {
  min,  ///< the lower
  max,  ///< the higher
};

namespace detail {

/// Throws an error that the metric lacks `reduce`.
[[noreturn]] void cannot_be_reduced(const std::string& metric);

/// A type-erased metric.
class AnyMetric {
 public:
  virtual ~AnyMetric() = default;
  virtual std::string name() const = 0;
  virtual void add(const Loss& loss) = 0;
  virtual double value() = 0;
  virtual void reduce(SumOfRanks sum) = 0;
};

template <metric M>
class MetricOf final : public AnyMetric {
 public:
  explicit MetricOf(M metric) : metric_(std::move(metric)) {}
  std::string name() const override { return std::string(metric_.name); }
  void add(const Loss& loss) override { metric_.add(loss); }
  double value() override { return metric_.value(); }
  void reduce(SumOfRanks sum) override {
    if constexpr (requires { metric_.reduce(sum); })
      metric_.reduce(sum);
    else
      cannot_be_reduced(name());
  }

 private:
  M metric_;
};

/// Collects the result of `Trainer::evaluate`.
class Evaluator {
 public:
  template <metric... Metrics>
  explicit Evaluator(Metrics... metrics) {
    (metrics_.push_back(std::make_unique<MetricOf<Metrics>>(std::move(metrics))), ...);
    check_names();
  }

  void add(const Loss& loss, std::int64_t samples);
  void reduce(SumOfRanks sum);
  Evaluation result();

 private:
  void check_names() const;

  std::vector<std::unique_ptr<AnyMetric>> metrics_;
  MeanLoss loss_;
  std::int64_t samples_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// All validations of a `fit`, as part of its state.
struct ValidationHistory {
  std::vector<Validation>& all;
  void state(Archive& archive);
};

/// Returns `given`, or the known mode of loss or accuracy. Throws for other metrics; messages begin with `owner`.
Mode mode_of(const char* owner, std::string_view metric, std::optional<Mode> given);

/// Compares two numbers, with a margin of `min_delta`. NaN is never better; anything else is better than NaN.
bool is_better(Mode mode, double number, double than, double min_delta = 0);

/// Throws unless the metric is one of `validated` (`validation/loss`, …).
void check_is_validated(const char* owner, const std::string& metric, const std::vector<std::string>& validated);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/metrics.ipp>
#endif
