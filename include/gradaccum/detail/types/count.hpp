// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

namespace gradaccum::detail {

/// A count in an option. Accepts every integer type, so `{.steps = files.size()}` is not a narrowing conversion.
class Count {
 public:
  template <std::convertible_to<std::int64_t> Number>
  requires(!std::floating_point<Number> && !std::same_as<Number, bool>) constexpr Count(
      Number value)  // NOLINT(google-explicit-constructor): an option is a plain number
      : value_(static_cast<std::int64_t>(value)) {}

  constexpr operator std::int64_t() const { return value_; }  // NOLINT(google-explicit-constructor)

 private:
  std::int64_t value_;
};

}  // namespace gradaccum::detail
