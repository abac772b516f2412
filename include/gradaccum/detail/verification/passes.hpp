// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Restores a model at the end of a scope: parameters, gradients, buffers, modes, and the random state of the CPU and
/// of the model's devices.
class ModelGuard {
 public:
  /// A module of the model. Its submodules follow it, up to `end`.
  struct Part {
    std::string name;
    torch::nn::Module* module;
    std::size_t end;
    bool training;
  };
  using Modes = std::vector<bool>;  ///< for each part: true in training mode

  explicit ModelGuard(torch::nn::Module& model);
  ModelGuard(const ModelGuard&) = delete;
  ModelGuard& operator=(const ModelGuard&) = delete;
  ~ModelGuard();

  const std::vector<Part>& parts() const { return parts_; }
  Modes modes() const;  ///< the original modes

  /// Restores parameters, buffers and random state, removes gradients, and sets modes.
  void rewind(const Modes& modes);
  void use_other_random_numbers();
  std::vector<at::Tensor> random_state() const;
  /// Returns whether the part's own buffers differ from what `rewind` restored.
  bool changed_buffers(const Part& part) const;

 private:
  void list(const std::string& name, torch::nn::Module& module);
  void keep(const at::Tensor& tensor);

  std::vector<Part> parts_;
  std::vector<at::Tensor> parameters_, gradients_;
  std::vector<at::Tensor> tensors_, values_;  // parameters and buffers, and their original values
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> random_state_;
};

/// The name and class of a part: `encoder.norm (BatchNorm1d)`.
std::string name_of(const ModelGuard::Part& part);

/// A batch and its micro-batches, independent of their types.
struct SplitBatch {
  static constexpr std::int64_t whole = -1;

  std::function<std::size_t(std::int64_t steps)> split;  ///< returns the number of parts
  std::function<std::int64_t(std::size_t part)> rows;
  std::function<Loss(std::int64_t part)> loss;  ///< loss of a micro-batch, or of the whole batch
};

std::vector<std::int64_t> rows_of_parts(std::int64_t rows, std::int64_t steps);

/// Splits rows as evenly as possible: the first parts have one more.
struct SplitRows {
  template <has_rows B>
  std::vector<B> operator()(const B& batch, std::int64_t steps) const {
    std::vector<B> parts;
    std::int64_t from = 0;
    for (auto count : rows_of_parts(rows_of(batch), steps)) {
      parts.push_back(narrowed(batch, from, count));
      from += count;
    }
    return parts;
  }
};

using GradientList = std::vector<at::Tensor>;  ///< one per parameter; undefined means zeros

/// The largest absolute value of all elements; NaN if one is NaN.
double largest(const GradientList& gradients);

/// Runs forward and backward passes of one batch and of its micro-batches, each from the same state of the model.
class VerifyPasses {
 public:
  using Modes = ModelGuard::Modes;
  using LossOf = std::function<Loss(std::int64_t)>;

  /// `rows` are the row counts of the micro-batches. `tolerance` defaults to that of the parameters' dtype.
  VerifyPasses(torch::nn::Module& model, LossOf loss_of, std::vector<std::int64_t> rows,
               std::optional<double> tolerance);

  const ModelGuard& model() const { return guard_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::int64_t>& rows() const { return rows_; }
  double tolerance() const { return tolerance_; }

  /// The gradients of a micro-batch, or of the whole batch.
  GradientList gradients_of(std::int64_t batch, const Modes& modes, bool other_random_numbers = false);
  /// The mean gradients, as an accumulator computes them.
  GradientList accumulated(const Modes& modes) { return accumulated(modes, nullptr); }
  /// The sum of the micro-batches' gradients, each times its share.
  GradientList accumulated(const Modes& modes, const std::vector<double>& shares) {
    return accumulated(modes, &shares);
  }
  /// Runs a forward pass of the first micro-batch, to observe its effects.
  void forward(const Modes& modes);

  /// The error of each parameter; `error` is the largest of them.
  std::vector<double> errors(const GradientList& a, const GradientList& b) const;
  double error(const GradientList& a, const GradientList& b) const;
  bool differ(const GradientList& a, const GradientList& b) const { return error(a, b) > tolerance_; }
  /// Returns whether micro-batches with these shares give other gradients than the whole batch.
  bool unequal(const Modes& modes, const std::vector<double>& shares) {
    return differ(accumulated(modes, shares), gradients_of(SplitBatch::whole, modes));
  }

  /// The losses and items of the micro-batches in the last call of `accumulated`.
  const std::vector<double>& losses() const { return losses_; }
  const std::vector<double>& items() const { return items_; }

 private:
  GradientList accumulated(const Modes& modes, const std::vector<double>* shares);
  GradientList take();

  ModelGuard guard_;
  LossOf loss_of_;
  std::vector<std::int64_t> rows_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<double> losses_, items_;
  double tolerance_;
};

/// Finds by experiment why micro-batches give other gradients than one batch. Returns a sentence per cause.
///
/// Starts with all modules in evaluation mode, where only the loss can be a cause, and looks for a weighted sum of the
/// micro-batches' gradients that equals the whole batch's. Continues with some modules in training mode.
///
/// `whole` holds the gradients of one batch. `equal` says that those of the micro-batches were equal to them.
std::vector<std::string> causes_of_difference(VerifyPasses& passes, const GradientList& whole, bool equal);

/// Lists the first values: `3, 3, 2, 2`, or `1, 2, 3, 4, 5, 6, and 7 more`, where `rest` is the text before 7.
template <class Value>
std::string listed(const std::vector<Value>& values, const std::string& rest = ", and ") {
  constexpr std::size_t most = 6;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, values.size()); ++i) text += c10::str(i > 0 ? ", " : "", values[i]);
  return values.size() <= most ? text : text + rest + std::to_string(values.size() - most) + " more";
}

/// Formats a number as `3.1e-02`.
std::string scientific(double value);

/// Sentences for the causes.
namespace sentences {

inline constexpr auto not_finite = "the gradients of the whole batch are not finite: there is nothing to compare";
inline constexpr auto zero = "the gradients of the whole batch are 0: there is nothing to compare";
inline constexpr auto not_a_function =
    "the same batch gives other gradients each time, from the same random numbers: the objective or a module keeps a "
    "state of its own, or draws from a generator of its own";
inline constexpr auto always_random =
    "random numbers are drawn in evaluation mode, too, by the objective or by a forward() that does not ask "
    "is_training(): other ones for micro-batches than for one batch";
inline constexpr auto draws = "draws random numbers in training mode, other ones for micro-batches than for one batch";
inline constexpr auto statistics = "computes over its whole batch in training mode, and changes its buffers";
inline constexpr auto over_the_batch = "computes over its whole batch in training mode";
inline constexpr auto no_module_alone =
    "in evaluation mode the gradients are equal, but no module alone makes the difference";
inline constexpr auto ended_early = "the search ended early, with the model in evaluation mode: ";
inline constexpr auto too_few_parameters =
    "the loss is no mean over rows: over what, so few parameters do not tell; ask with fewer steps";

std::string rows(const std::vector<std::int64_t>& rows);
std::string sum(std::size_t steps);
std::string items(std::vector<double> shares, const std::vector<double>& losses);
std::string coupling(double error);

}  // namespace sentences
}  // namespace gradaccum::detail
