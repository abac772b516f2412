// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/samples_of.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/detail/verification/split.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum {

/// In how many parts the batch goes, and what counts as equal.
struct VerifyAccumulationOptions {
  std::int64_t steps = 8;                ///< micro-batches, >= 2
  std::optional<double> tolerance = {};  ///< by default 1e-10 for float64, 1e-4 for float32, 10 roundings for 16 bits
};

/// How far the gradients of micro-batches are from those of one batch, and why. Prints as a table.
struct AccumulationReport {
  struct Parameter {
    std::string name;
    double relative_error;  ///< max|a - b| / max|b|; 0 where neither has a gradient, infinity where one is not finite
  };
  std::vector<Parameter> parameters;  ///< those that require grad, in the model's order
  std::vector<std::string> causes;    ///< what breaks the equality, a sentence each; or is random, though it did not
  std::int64_t steps = 0;
  double tolerance = 0;

  double worst() const;
  bool exact() const { return worst() <= tolerance && causes.empty(); }
};

/// What `std::cout << report` prints.
std::string to_string(const AccumulationReport& report);
std::ostream& operator<<(std::ostream& stream, const AccumulationReport& report);

namespace detail {
AccumulationReport compare_gradients(torch::nn::Module& model, const SplitBatch& batch,
                                     const VerifyAccumulationOptions& options);
}

/// Finds out whether micro-batches give this model and objective the gradients of one batch, and names what breaks it.
///
///     const auto mean_loss = [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     };
///     const auto report = ga::verify_accumulation(model, mean_loss, ga::data::Batch{x, y}, {.steps = 5});
///     std::cout << report;                                // a table, and a sentence for each cause
///     TORCH_CHECK(report.exact(), "micro-batches must do what one batch does");
///
/// The objective is called with the model as it was given (a `ModuleHolder`, a `shared_ptr`, a `Module&`) and with a
/// batch, and returns its mean loss, or `ga::Loss{mean, items}`. A batch is a tensor, two named `data` and `target`, a
/// pair or tuple of tensors, a `data::SequenceBatch`, all split by rows, or a vector; for any other, `split(batch,
/// steps)` returns `steps` micro-batches. It needs a row for each.
///
/// Where gradients differ, and where another random state changes them, the causes are found by experiment: modules in
/// evaluation mode, other weights for the micro-batches.
///
/// The model is left as it was, also by an exception: parameters, `.grad`, buffers, the mode of every module, the
/// random state of the CPU and of its devices. What the objective writes to elsewhere is not looked after.
///
/// @note Waits for the device. Takes the memory of one large batch, of the model, and of three sets of its
/// gradients; the time of three passes, and where there are causes, of some more for each.
template <detail::model Model, class Objective, class Batch, class Split = detail::SplitRows>
AccumulationReport verify_accumulation(Model&& model, Objective objective, Batch batch,
                                       VerifyAccumulationOptions options = {}, const Split& split = {}) {
  static_assert(!std::same_as<Split, detail::SplitRows> || detail::has_rows<Batch>,
                "verify_accumulation: how to split this batch is not known; pass, last, a function (const Batch&, "
                "std::int64_t steps) -> std::vector<Batch>");
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
#include <gradaccum/verify_accumulation.ipp>
#endif
