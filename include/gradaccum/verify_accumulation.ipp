// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/verify_accumulation.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/verification/causes.hpp>
#include <gradaccum/detail/verification/passes.hpp>
#include <gradaccum/detail/verification/sentences.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <ostream>

namespace gradaccum {

GRADACCUM_INLINE double AccumulationReport::worst() const {
  double worst = 0;
  for (auto& parameter : parameters) worst = std::max(worst, parameter.relative_error);
  return worst;
}

GRADACCUM_INLINE std::string to_string(const AccumulationReport& report) {
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

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const AccumulationReport& report) {
  return stream << to_string(report);
}

GRADACCUM_INLINE AccumulationReport detail::compare_gradients(torch::nn::Module& model, const SplitBatch& batch,
                                                              const VerifyAccumulationOptions& options) {
  TORCH_CHECK(options.steps >= 2, "verify_accumulation: steps must be >= 2, got ", options.steps);
  TORCH_CHECK(options.tolerance.value_or(0) >= 0, "verify_accumulation: tolerance must be >= 0, got ",
              options.tolerance.value_or(0));
  const auto parts = batch.split(options.steps);
  TORCH_CHECK(static_cast<std::int64_t>(parts) == options.steps,
              "verify_accumulation: split must return steps = ", options.steps, " micro-batches, got ", parts);
  std::vector<std::int64_t> rows;
  for (std::size_t part = 0; part < parts; ++part) rows.push_back(batch.rows(part));

  at::AutoGradMode with_gradients(true);
  VerifyPasses passes(model, batch.loss, std::move(rows), options.tolerance);
  const auto as_it_is = passes.model().modes();
  const auto whole = passes.gradients_of(SplitBatch::whole, as_it_is);
  const auto errors = passes.errors(passes.accumulated(as_it_is), whole);
  AccumulationReport report;
  report.steps = static_cast<std::int64_t>(passes.rows().size());
  report.tolerance = passes.tolerance();
  for (std::size_t i = 0; i < errors.size(); ++i) report.parameters.push_back({passes.names()[i], errors[i]});
  report.causes = causes_of_difference(passes, whole, report.worst() <= report.tolerance);
  return report;
}

}  // namespace gradaccum
