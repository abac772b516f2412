// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: metrics

#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

class Archive;

namespace detail {

/// The weighted mean of means, each over `weight` items, in float64. Numbers on a device are summed there, without
/// synchronizing.
class WeightedMean {
 public:
  void add(const at::Tensor& mean, double weight);
  void add(double mean, double weight) {
    host_sum_ += weight * mean;
    weight_ += weight;
  }
  double weight() const { return weight_; }
  /// Returns the mean, 0-dim float64, on the device of the numbers; NaN if there are none.
  at::Tensor value() const;
  void state(Archive& archive);

 private:
  double weight_ = 0, host_sum_ = 0;
  at::Tensor device_sum_;
};

}  // namespace detail

/// Reduces the losses of an evaluation to one number, or to a tensor.
///
///     struct LargestError {
///       std::string_view name = "largest_error";          // or static
///       bool higher_is_better = false;                    // if it says; then EarlyStopping and SaveState need no mode
///       at::Tensor largest;
///       void reset() { largest = torch::zeros({}); }
///       void add(const ga::Loss& loss) { largest = at::max(largest, (loss.output - loss.target).abs().max()); }
///       double value() const { return largest.item<double>(); }
///     };
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       auto output = net->forward(batch.data);
///       return ga::Loss(torch::mse_loss(output, batch.target)).with(output, batch.target);
///     });
///     std::cout << trainer.evaluate(batches, LargestError{})["largest_error"] << '\n';
///
/// Each evaluation copies the metric that was passed and calls its `reset()`, as torchmetrics does. A trivially
/// copyable metric, with numbers only, does not need `reset()`; a copied Tensor would share its memory.
template <class M>
concept metric = requires(M& metric, const Loss& loss) {
  { metric.name } -> std::convertible_to<std::string_view>;
  metric.add(loss);
  requires std::convertible_to<decltype(metric.value()), double> ||
      std::convertible_to<decltype(metric.value()), at::Tensor>;
};

/// Replaces a tensor by its sum over all ranks. If several ranks share an evaluation, a metric needs a member that sums
/// its tensors, as in `void reduce(ga::SumOfRanks sum) { sum(right); }`; all ranks must make the same calls.
using SumOfRanks = c10::function_ref<void(at::Tensor&)>;

/// The mean loss over all items; each loss is weighted by its number of items.
///
/// @note `value()` synchronizes with the device.
class MeanLoss {
 public:
  static constexpr std::string_view name = "loss";
  static constexpr bool higher_is_better = false;

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

/// The kind of classification, by torchmetrics' names.
enum class Task {
  binary,      ///< yes or no per target, by one score; shapes may differ in dimensions of size 1
  multiclass,  ///< one class per target: the class with the highest score
  multilabel,  ///< yes or no per target, by one score; each label has its own counts
};

/// How to average the scores of several classes or labels.
enum class Average {
  macro,     ///< the mean over classes, without classes that have neither predictions nor targets
  micro,     ///< the score of the summed counts
  weighted,  ///< the mean, weighted by the classes' numbers of targets
};

/// Scores that are computed from counts per class.
enum class Score {
  precision,  ///< the fraction of predictions that are right
  recall,     ///< the fraction of targets that were predicted
  f1,         ///< the harmonic mean of both
};

namespace detail {

/// The options of a metric that counts classes.
struct ClassesOf {
  std::string_view metric;
  std::int64_t dim, ignore_index;
  std::optional<Task> task;
  double threshold;
};

void add_scores(const ClassesOf& of, const Loss& loss, at::Tensor& counts);
double class_score(const ClassesOf& of, const at::Tensor& counts, Score score, Average average);
void reduce_counts(std::string_view metric, at::Tensor& counts, SumOfRanks sum);

}  // namespace detail

/// The fraction of right predictions, in [0, 1]; NaN if there are none.
///
/// The objective returns `ga::Loss{mean, items}.with(output, target)`.
///
/// | output | target | task |
/// |---|---|---|
/// | [N, C, …] | [N, …] or [N, 1, …], integers | multiclass: right if the target's class has the highest score |
/// | [N] or [N, 1, …] | as many, 0 or 1 | binary: right if `score > threshold` exactly if the target is 1 |
/// | [N, C, …] | [N, C, …] | multilabel, or multiclass with probabilities as targets; `task` is required |
///
/// A NaN is never right. `value()` throws if a target is invalid, such as class 3 of 3.
///
/// @note `value()` synchronizes with the device; `add` does not.
struct Accuracy {
  static constexpr std::string_view name = "accuracy";
  static constexpr bool higher_is_better = true;

  std::int64_t dim = 1;              ///< the output's dimension of classes or labels
  std::int64_t ignore_index = -100;  ///< value of targets that are ignored
  std::optional<Task> task = {};     ///< by default derived from the shapes
  double threshold = 0;              ///< scores above it mean yes: 0 for logits, 0.5 for probabilities
  at::Tensor right = {}, counted = {}, impossible = {};  ///< not an option: counts so far, 0-dim int64, on the device

  void add(const Loss& loss);
  double value() const;
  void reduce(SumOfRanks sum);
  void reset() { right = counted = impossible = at::Tensor(); }
};

/// Computes `ga::Precision`, `ga::Recall` or `ga::F1`: for a binary task the score of yes, for others an average over
/// classes or labels. A score of 0 / 0 is 0. Outputs and targets are as for `Accuracy`.
///
/// @note `value()` synchronizes with the device; `add` does not.
template <Score score>
struct ClassScore {
  static constexpr std::string_view name = std::array{"precision", "recall", "f1"}[static_cast<std::size_t>(score)];
  static constexpr bool higher_is_better = true;

  std::int64_t dim = 1;              ///< the output's dimension of classes or labels
  std::int64_t ignore_index = -100;  ///< value of targets that are ignored
  std::optional<Task> task = {};     ///< by default derived from the shapes, see `Accuracy`
  double threshold = 0;              ///< scores above it mean yes: 0 for logits, 0.5 for probabilities
  Average average = Average::macro;  ///< average over classes or labels
  at::Tensor counts = {};            ///< not an option: per class right, predicted and targets; then invalid targets

  void add(const Loss& loss) { detail::add_scores(classes(), loss, counts); }
  double value() const { return detail::class_score(classes(), counts, score, average); }
  void reduce(SumOfRanks sum) { detail::reduce_counts(classes().metric, counts, sum); }
  void reset() { counts = at::Tensor(); }

 private:
  detail::ClassesOf classes() const {
    return {std::array{"Precision", "Recall", "F1"}[static_cast<std::size_t>(score)], dim, ignore_index, task,
            threshold};
  }
};

using Precision = ClassScore<Score::precision>;  ///< the fraction of predictions that are right
using Recall = ClassScore<Score::recall>;        ///< the fraction of targets that were predicted
using F1 = ClassScore<Score::f1>;                ///< the harmonic mean of `Precision` and `Recall`

/// Counts targets by class and predicted class, in `Evaluation::tensors`: int64 on the CPU, [target, predicted], or
/// [label, target, predicted] for labels. Outputs and targets are as for `Accuracy`. A score of NaN counts as no, or as
/// a prediction of its class.
///
/// @note `value()` synchronizes with the device; `add` does not.
struct ConfusionMatrix {
  static constexpr std::string_view name = "confusion_matrix";

  std::int64_t dim = 1;              ///< the output's dimension of classes or labels
  std::int64_t ignore_index = -100;  ///< value of targets that are ignored
  std::optional<Task> task = {};     ///< by default derived from the shapes, see `Accuracy`
  double threshold = 0;              ///< scores above it mean yes: 0 for logits, 0.5 for probabilities
  at::Tensor counts = {};            ///< not an option: the flattened counts, then the number of invalid targets

  void add(const Loss& loss);
  at::Tensor value() const;
  void reduce(SumOfRanks sum);
  void reset() { counts = at::Tensor(); }
};

/// Joins the outputs that the objective passes by `.with(output, target)` to one CPU tensor in `Evaluation::tensors`,
/// in the order of the batches.
///
///     auto objective = [](auto& net, auto& batch) {
///       auto output = net->forward(batch.data);
///       return ga::Loss(torch::mse_loss(output, batch.target)).with(output, batch.target);
///     };
///     ga::Trainer trainer(model, sgd, objective);
///     at::Tensor outputs = trainer.evaluate(batches, ga::Predictions{}).tensors["predictions"];
///
/// @note Keeps all outputs in memory. `add` synchronizes with the device.
class Predictions {
 public:
  static constexpr std::string_view name = "predictions";

  void add(const Loss& loss);
  at::Tensor value() const;
  void reset() { outputs_.clear(); }

 private:
  std::vector<at::Tensor> outputs_;  // of each batch
};

/// The result of an evaluation. Prints with six digits: `accuracy: 0.784000, loss: 0.625000`.
struct Evaluation {
  std::map<std::string, double, std::less<>> metrics = {};  ///< by name; always includes "loss"
  std::map<std::string, at::Tensor> tensors = {};           ///< metrics whose values are tensors, by name
  double items = 0;                                         ///< sum of the losses' weights
  std::int64_t samples = 0;
  double seconds = 0;

  double operator[](std::string_view name) const;
};

std::ostream& operator<<(std::ostream& stream, const Evaluation& evaluation);

/// A validation during training and its position. `Validate` passes it to every policy that has `on_validation`.
///
///     auto report = ga::Trainer(model, sgd, objective).fit(batches);
///     for (const ga::Validation& validation : report.validations)
///       std::cout << validation.update << ": " << validation["loss"].value() << '\n';
struct Validation {
  std::string name = "validation";  ///< the name of its `Validate`
  std::int64_t update = 0;          ///< the trainer's updates so far
  std::int64_t epoch = 0;           ///< counted from 0
  std::int64_t samples = 0;         ///< samples that this `fit` has trained on
  double seconds = 0;               ///< duration of this `fit` so far
  Evaluation found = {};
  bool due = true;  ///< due by its `Validate`'s options; false: made only because a `fit` ended

  /// Looks up a number: by its own name, `loss`, if this validation is named "validation", or by both names,
  /// `test/loss`. Returns nullopt if it does not exist.
  std::optional<double> operator[](std::string_view metric) const;

 private:
  friend class Archive;
  void state(Archive& archive);
};

/// Prints `validation at update 100: accuracy: 0.910000, loss: 0.250000`.
std::ostream& operator<<(std::ostream& stream, const Validation& validation);

/// The direction in which a metric improves, by Python's names: `min` if lower is better, `max` if higher is.
enum class Mode { min, max };

/// Names of metrics, such as `validation/loss`, and the modes that they define.
using MetricModes = std::map<std::string, std::optional<Mode>, std::less<>>;

/// Enables gradients in an evaluation, for an objective that computes derivatives, as a physics-informed loss does.
/// Pass it among the metrics: `trainer.evaluate(batches, ga::WithGradients(), ga::Accuracy{})`.
struct WithGradients {};

namespace detail {

template <class M>
concept resettable = requires(M& metric) {
  metric.reset();
};
template <class M>
concept finds_number = requires(M& metric) {
  { metric.value() } -> std::convertible_to<double>;
};

/// Fails to compile with a message if the metric lacks a member.
template <class M>
constexpr bool is_metric() {
  constexpr bool has_name = requires(M & metric) { std::string_view(metric.name); };
  constexpr bool adds = requires(M & metric, const Loss& loss) { metric.add(loss); };
  constexpr bool has_value = finds_number<M> || requires(M & metric) { at::Tensor(metric.value()); };
  static_assert(has_name, "metric: needs a member std::string_view name, static or not, by which its number is found");
  static_assert(adds, "metric: needs a member void add(const ga::Loss&)");
  static_assert(has_value, "metric: needs a member double value(), or at::Tensor value()");
  constexpr bool begins_anew = resettable<M> || std::is_trivially_copyable_v<M>;
  static_assert(begins_anew,
                "metric: needs a member void reset(), which begins anew, since it has a member whose copies may share "
                "memory, a Tensor say");
  return has_name && adds && has_value && begins_anew;
}

template <class M>
concept tells_mode = std::same_as < std::remove_cvref_t<decltype(std::declval<const M&>().higher_is_better)>,
bool > ;

/// Returns the mode that the metric defines by `higher_is_better`, if any.
template <class M>
std::optional<Mode> mode_told_by(const M& metric) {
  if constexpr (tells_mode<M>)
    return metric.higher_is_better ? Mode::max : Mode::min;
  else
    return std::nullopt;
}

/// Throws an error that the metric lacks `reduce`.
[[noreturn]] void cannot_be_reduced(const std::string& metric);

/// A type-erased metric.
class AnyMetric {
 public:
  virtual ~AnyMetric() = default;
  virtual std::string name() const = 0;
  virtual void add(const Loss& loss) = 0;
  virtual void tell(Evaluation& found) = 0;
  virtual void reduce(SumOfRanks sum) = 0;
};

template <metric M>
class MetricOf final : public AnyMetric {
 public:
  explicit MetricOf(M metric) : metric_(std::move(metric)) {
    if constexpr (resettable<M>) metric_.reset();
  }
  std::string name() const override { return std::string(metric_.name); }
  void add(const Loss& loss) override { metric_.add(loss); }
  void tell(Evaluation& found) override {
    if constexpr (finds_number<M>)
      found.metrics[name()] = metric_.value();
    else
      found.tensors[name()] = at::Tensor(metric_.value()).detach().cpu().clone();  // the metric may change its own
  }
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
  template <class... Metrics>
  explicit Evaluator(Metrics... metrics) {
    (take(std::move(metrics)), ...);
    check_names();
  }

  bool with_gradients() const { return with_gradients_; }
  void add(const Loss& loss, std::int64_t samples);
  void reduce(SumOfRanks sum);
  Evaluation result();

 private:
  void check_names() const;
  void take(WithGradients) { with_gradients_ = true; }
  template <class M>
  void take(M metric) {
    if constexpr (is_metric<M>()) metrics_.push_back(std::make_unique<MetricOf<M>>(std::move(metric)));
  }

  std::vector<std::unique_ptr<AnyMetric>> metrics_;
  MeanLoss loss_;
  std::int64_t samples_ = 0;
  bool with_gradients_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// All validations of a `fit`, as part of its state.
struct ValidationHistory {
  std::vector<Validation>& all;
  void state(Archive& archive);
};

/// Tensors by name, as part of a state. Loaded tensors do not share memory with the file.
struct OwnTensors {
  std::map<std::string, at::Tensor>& all;
  void state(Archive& archive);
};

/// Returns the mode that the metric defines, else `given`, else the known mode of loss or accuracy. Throws if there is
/// none; with `validated`, also if the metric is not in it, or defines another mode than `given`.
Mode mode_of(const char* owner, std::string_view metric, std::optional<Mode> given,
             const MetricModes* validated = nullptr);

/// Compares two numbers, with a margin of `min_delta`. NaN is never better; anything else is better than NaN.
bool is_better(Mode mode, double number, double than, double min_delta = 0);
/// Warns if no number can be better than this best one.
void warn_if_last(const char* owner, const std::string& metric, Mode mode, double best);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/metrics/metrics.ipp>
#endif
