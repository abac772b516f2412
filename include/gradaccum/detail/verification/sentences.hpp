// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// The first few: `3, 3, 2, 2`, or `1, 2, 3, 4, 5, 6, and 7 more`, `and` being what is put before the rest.
template <class Value>
std::string listed(const std::vector<Value>& values, const std::string& rest = ", and ") {
  constexpr std::size_t most = 6;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, values.size()); ++i) text += c10::str(i > 0 ? ", " : "", values[i]);
  return values.size() <= most ? text : text + rest + std::to_string(values.size() - most) + " more";
}

/// `3.1e-02`
inline std::string scientific(double value) {
  char text[16];
  std::snprintf(text, sizeof(text), "%.1e", value);
  return text;
}

/// The causes, in words.
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

inline std::string rows(const std::vector<std::int64_t>& rows) {
  return "the loss is a mean over rows, and the micro-batches have unequal ones (" + listed(rows) +
         "): return ga::Loss{mean, rows}";
}

inline std::string sum(std::size_t steps) {
  return "the loss is a sum, not a mean: the whole batch has " + std::to_string(steps) +
         " times the gradient of a micro-batch; divide it by its rows";
}

inline std::string items(std::vector<double> shares, const std::vector<double>& losses) {
  for (auto& share : shares) share = std::round(1000 * share) / 1000;
  std::string text = "the loss is a mean over items that the micro-batches have unequal shares of (" + listed(shares) +
                     "), as valid tokens are: return ga::Loss{mean, items}";
  for (std::size_t i = 0; i < losses.size(); ++i)
    if (!std::isfinite(losses[i]))
      return text + "; with 0 items where there are none: the loss of number " + std::to_string(i) + " is not finite";
  return text;
}

inline std::string coupling(double error) {
  std::string text =
      "no sum of the micro-batches' gradients is the whole batch's, in evaluation mode either: what a sample adds to "
      "the loss depends on the others, as in a contrastive loss or in a BatchNorm without running statistics";
  if (error > 0.05) return text;
  return text + "; or, as the error there is but " + scientific(error) +
         ", it is rounding (autocast, TF32): then a tolerance above it";
}

}  // namespace sentences
}  // namespace gradaccum::detail
