// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/samples_of.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/detail/verification/causes.hpp>
#include <gradaccum/detail/verification/passes.hpp>
#include <gradaccum/detail/verification/sentences.hpp>
#include <gradaccum/detail/verification/split.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum {

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

inline double AccumulationReport::worst() const {
  double worst = 0;
  for (auto& parameter : parameters) worst = std::max(worst, parameter.relative_error);
  return worst;
}

inline std::string to_string(const AccumulationReport& report) {
  constexpr std::size_t most = 5;
  auto parameters = report.parameters;
  std::stable_sort(parameters.begin(), parameters.end(),
                   [](auto& a, auto& b) { return a.relative_error > b.relative_error; });
  const bool equal = report.worst() <= report.tolerance;
  const auto* verdict = report.exact() ? "equal" : equal ? "equal, but" : "NOT EQUAL";
  std::string text = std::to_string(report.steps) + " micro-batches and one batch: " + verdict + " (tolerance " +
                     detail::scientific(report.tolerance) + ")\n";
  text += "  relative error  parameter\n";
  for (std::size_t i = 0; i < std::min(most, parameters.size()); ++i)
    text += "  " + detail::scientific(parameters[i].relative_error) + "         " + parameters[i].name + '\n';
  if (parameters.size() > most)
    text += "  and " + std::to_string(parameters.size() - most) + " more, all of them nearer\n";
  for (auto& cause : report.causes) text += "  * " + cause + '\n';
  return text;
}

inline std::ostream& operator<<(std::ostream& stream, const AccumulationReport& report) {
  return stream << to_string(report);
}

namespace detail {

inline AccumulationReport compare_gradients(torch::nn::Module& model, VerifyPasses::LossOf loss_of,
                                            std::vector<std::int64_t> rows, std::optional<double> tolerance) {
  at::AutoGradMode with_gradients(true);
  VerifyPasses passes(model, std::move(loss_of), std::move(rows), tolerance);
  const auto as_it_is = passes.model().modes();
  const auto whole = passes.gradients_of(VerifyPasses::whole_batch, as_it_is);
  const auto errors = passes.errors(passes.accumulated(as_it_is), whole);
  AccumulationReport report;
  report.steps = static_cast<std::int64_t>(passes.rows().size());
  report.tolerance = passes.tolerance();
  for (std::size_t i = 0; i < errors.size(); ++i) report.parameters.push_back({passes.names()[i], errors[i]});
  report.causes = CauseSearch(passes).run(whole, report.worst() <= report.tolerance);
  return report;
}

}  // namespace detail

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
/// @note Synchronises with the device. Takes the memory of one large batch, of the model, and of three sets of its
/// gradients; the time of three passes, and where there are causes, of some more for each.
template <detail::model Model, class Objective, class Batch, class Split = detail::SplitRows>
AccumulationReport verify_accumulation(Model&& model, Objective objective, Batch batch,
                                       VerifyAccumulationOptions options = {}, const Split& split = {}) {
  static_assert(!std::same_as<Split, detail::SplitRows> || detail::has_rows<Batch>,
                "verify_accumulation: how to split this batch is not known; pass, last, a function (const Batch&, "
                "std::int64_t steps) -> std::vector<Batch>");
  TORCH_CHECK(options.steps >= 2, "verify_accumulation: steps must be >= 2, got ", options.steps);
  TORCH_CHECK(options.tolerance.value_or(0) >= 0, "verify_accumulation: tolerance must be >= 0, got ",
              options.tolerance.value_or(0));
  std::vector<Batch> parts = split(std::as_const(batch), options.steps);
  TORCH_CHECK(static_cast<std::int64_t>(parts.size()) == options.steps,
              "verify_accumulation: split must return steps = ", options.steps, " micro-batches, got ", parts.size());
  std::vector<std::int64_t> rows;
  for (auto& part : parts) rows.push_back(detail::samples_of(part));
  const auto loss_of = [&](std::int64_t i) -> Loss {
    return objective(model, i == detail::VerifyPasses::whole_batch ? batch : parts[static_cast<std::size_t>(i)]);
  };
  return detail::compare_gradients(detail::module_of(model), loss_of, std::move(rows), options.tolerance);
}

}  // namespace gradaccum
