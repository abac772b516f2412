// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/mode.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace gradaccum::detail {

GRADACCUM_INLINE Mode mode_of(const char* owner, std::string_view metric, std::optional<Mode> given) {
  if (given) return *given;
  const auto name = metric.substr(metric.rfind('/') + 1);  // npos + 1 is 0
  TORCH_CHECK(name == "loss" || name == "accuracy", owner, ": mode must say whether a lower or a higher '",
              std::string(metric), "' is better: ga::Mode::min or ga::Mode::max");
  return name == "loss" ? Mode::min : Mode::max;
}

GRADACCUM_INLINE bool is_better(Mode mode, double number, double than, double min_delta) {
  if (std::isnan(number) || std::isnan(than)) return !std::isnan(number);
  return mode == Mode::min ? number < than - min_delta : number > than + min_delta;
}

GRADACCUM_INLINE void check_is_validated(const char* owner, const std::string& metric,
                                         const std::vector<std::string>& validated) {
  const bool known = std::any_of(validated.begin(), validated.end(), [&](const std::string& name) {
    return name == metric || name == "validation/" + metric;
  });
  TORCH_CHECK(known, owner, ": metric must be a number that a ga::Validate of this trainer finds, one of [",
              fmt::format("{}", fmt::join(validated, ", ")), "], got '", metric, "'");
}

}  // namespace gradaccum::detail
