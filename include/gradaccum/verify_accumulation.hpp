// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: verification

#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum {

/// Options for `verify_accumulation`.
struct VerifyAccumulationOptions {
  std::int64_t steps = 8;                ///< micro-batches, >= 2
  std::optional<double> tolerance = {};  ///< by default 1e-10 for float64, 1e-4 for float32, 10 roundings for 16 bits
};

/// The differences between gradients of micro-batches and of one batch, and their causes. Printable.
struct AccumulationReport {
  struct Parameter {
    std::string name;
    double relative_error;  ///< max|a - b| / max|b|; 0 if neither has a gradient, infinity if one is not finite
  };
  std::vector<Parameter> parameters;  ///< parameters that require grad, in the model's order
  std::vector<std::string> causes;    ///< a sentence per cause of a difference, or of randomness without one
  std::int64_t steps = 0;
  double tolerance = 0;

  double worst() const;
  bool exact() const { return worst() <= tolerance && causes.empty(); }
};

/// Formats a report as `std::cout << report` prints it.
std::string to_string(const AccumulationReport& report);
std::ostream& operator<<(std::ostream& stream, const AccumulationReport& report);

namespace detail {

/// A batch and its micro-batches, independent of their types.
struct SplitBatch {
  static constexpr std::int64_t whole = -1;

  std::function<std::size_t(std::int64_t steps)> split;  ///< returns the number of parts
  std::function<std::int64_t(std::size_t part)> rows;
  std::function<Loss(std::int64_t part)> loss;  ///< loss of a micro-batch, or of the whole batch
};

AccumulationReport compare_gradients(torch::nn::Module& model, const SplitBatch& batch,
                                     const VerifyAccumulationOptions& options);

/// Returns the row counts of micro-batches, as even as possible: the first have one more.
std::vector<std::int64_t> rows_of_parts(std::int64_t rows, std::int64_t steps);

}  // namespace detail

/// Checks whether micro-batches give the gradients of one batch for this model and objective, and names causes if not.
///
///     const auto mean_loss = [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     };
///     const auto report = ga::verify_accumulation(model, mean_loss, ga::data::Batch{x, y}, {.steps = 5});
///     std::cout << report;                                // a table, and a sentence for each cause
///     TORCH_CHECK(report.exact(), "micro-batches must do what one batch does");
///
/// `objective(model, batch)` receives the model as it was passed and returns the batch's mean loss, or `ga::Loss{mean,
/// items}`. A batch is a tensor, a struct of `data` and `target`, a pair, tuple or map of tensors, or a
/// `data::SequenceBatch`, all split by rows, or a vector. For other types, `split(batch, steps)` returns `steps`
/// micro-batches. Each needs at least a row.
///
/// Finds causes of differences, or of gradients that change with the random state, by experiments: modules in
/// evaluation mode, and different weights of the micro-batches.
///
/// Restores the model, even after an exception: parameters, `.grad`, buffers, the mode of every module, and the random
/// state of the CPU and the model's devices. Other effects of the objective are not undone.
///
/// @note Synchronizes. Takes memory for the whole batch, a copy of the model, and three sets of its gradients; and the
/// time of three passes, and of some more per cause.
template <class Model, class Objective, class Batch>
AccumulationReport verify_accumulation(Model&& model, Objective objective, Batch batch,
                                       VerifyAccumulationOptions options = {}) {
  static_assert(detail::has_rows<Batch>,
                "verify_accumulation: how to split this batch is not known; pass, last, a function (const Batch&, "
                "std::int64_t steps) -> std::vector<Batch>");
  const auto split_rows = [](const Batch& whole, std::int64_t steps) {
    std::vector<Batch> parts;
    std::int64_t from = 0;
    for (auto count : detail::rows_of_parts(detail::rows_of(whole), steps)) {
      parts.push_back(detail::narrowed(whole, from, count));
      from += count;
    }
    return parts;
  };
  return verify_accumulation(model, std::move(objective), std::move(batch), options, split_rows);
}

/// Checks micro-batches that `split(batch, steps)` returns, for a batch of any type.
template <class Model, class Objective, class Batch, class Split>
AccumulationReport verify_accumulation(Model&& model, Objective objective, Batch batch,
                                       VerifyAccumulationOptions options, const Split& split) {
  std::vector<Batch> parts;
  return detail::compare_gradients(
      detail::module_of(model),
      {.split = [&](std::int64_t steps) { return (parts = split(std::as_const(batch), steps)).size(); },
       .rows = [&](std::size_t part) { return detail::samples_of(parts[part]); },
       .loss = [&](std::int64_t part) -> Loss {
         return objective(model, part == detail::SplitBatch::whole ? batch : parts[static_cast<std::size_t>(part)]);
       }},
      options);
}

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/verification/verify_accumulation.ipp>
#endif
