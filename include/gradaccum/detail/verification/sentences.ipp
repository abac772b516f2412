// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/sentences.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cmath>
#include <cstdio>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string scientific(double value) {
  char text[16];
  std::snprintf(text, sizeof(text), "%.1e", value);
  return text;
}

namespace sentences {

GRADACCUM_INLINE std::string rows(const std::vector<std::int64_t>& rows) {
  return "the loss is a mean over rows, and the micro-batches have unequal ones (" + listed(rows) +
         "): return ga::Loss{mean, rows}";
}

GRADACCUM_INLINE std::string sum(std::size_t steps) {
  return "the loss is a sum, not a mean: the whole batch has " + std::to_string(steps) +
         " times the gradient of a micro-batch; divide it by its rows";
}

GRADACCUM_INLINE std::string items(std::vector<double> shares, const std::vector<double>& losses) {
  for (auto& share : shares) share = std::round(1000 * share) / 1000;
  std::string text = "the loss is a mean over items that the micro-batches have unequal shares of (" + listed(shares) +
                     "), as valid tokens are: return ga::Loss{mean, items}";
  for (std::size_t i = 0; i < losses.size(); ++i)
    if (!std::isfinite(losses[i]))
      return text + "; with 0 items where there are none: the loss of number " + std::to_string(i) + " is not finite";
  return text;
}

GRADACCUM_INLINE std::string coupling(double error) {
  std::string text =
      "no sum of the micro-batches' gradients is the whole batch's, in evaluation mode either: what a sample adds to "
      "the loss depends on the others, as in a contrastive loss or in a BatchNorm without running statistics";
  if (error > 0.05) return text;
  return text + "; or, as the error there is but " + scientific(error) +
         ", it is rounding (autocast, TF32): then a tolerance above it";
}

}  // namespace sentences
}  // namespace gradaccum::detail
