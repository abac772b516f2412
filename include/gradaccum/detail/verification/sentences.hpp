// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradaccum::detail {

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

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/sentences.ipp>
#endif
