// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

namespace gradaccum::detail {

/// How many: a number in an option, of whatever integer type, so that `{.steps = files.size()}` is no narrowing.
class Count {
 public:
  template <std::integral Integer>
  requires(!std::same_as<Integer, bool>) constexpr Count(
      Integer value)  // NOLINT(google-explicit-constructor): an option is a plain number
      : value_(static_cast<std::int64_t>(value)) {}

  constexpr operator std::int64_t() const { return value_; }  // NOLINT(google-explicit-constructor)

 private:
  std::int64_t value_;
};

}  // namespace gradaccum::detail
