// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum {

/// The direction in which a metric improves, in Python's terms.
enum class Mode {
  min,  ///< the lower
  max,  ///< the higher
};

namespace detail {

/// Returns `given`, or the known mode of loss or accuracy. Throws for other metrics; messages begin with `owner`.
Mode mode_of(const char* owner, std::string_view metric, std::optional<Mode> given);

/// Compares two numbers, with a margin of `min_delta`. NaN is never better; anything else is better than NaN.
bool is_better(Mode mode, double number, double than, double min_delta = 0);

/// Throws unless the metric is one of `validated` (`validation/loss`, …).
void check_is_validated(const char* owner, const std::string& metric, const std::vector<std::string>& validated);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/mode.ipp>
#endif
