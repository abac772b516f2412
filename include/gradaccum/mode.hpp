// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum {

/// Which of two numbers of a metric is the better one, in Python's words.
enum class Mode {
  min,  ///< the lower
  max,  ///< the higher
};

namespace detail {

/// The mode that was given; else that of a metric that is known, loss or accuracy. Throws for another: `owner` says who
/// asks.
Mode mode_of(const char* owner, std::string_view metric, std::optional<Mode> given);

/// By more than `min_delta`; NaN is never better, and anything is better than it.
bool is_better(Mode mode, double number, double than, double min_delta = 0);

/// Throws where none of `validated` (`validation/loss`, …) is this metric.
void check_is_validated(const char* owner, const std::string& metric, const std::vector<std::string>& validated);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/mode.ipp>
#endif
