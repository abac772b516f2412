// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace gradaccum::detail {

/// A JSON value. A whole number is a `std::uint64_t`, or a `std::int64_t` if negative; any other number is a `double`.
struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string, Array, Object> value = nullptr;

  /// Returns nullptr if the value is of another kind.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&value);
  }
  /// Returns `null`, `boolean`, `number`, `string`, `array` or `object`.
  const char* kind() const;
  /// The value as one line of ASCII JSON, which can be truncated anywhere.
  std::string text() const;
};

/// Parses exactly one JSON value with unique names and at most `max_depth` levels of nesting. Throws
/// `std::runtime_error`; messages begin with `what`, for example a path.
Json parse_json(std::string_view text, std::size_t max_depth, const std::string& what);

/// A string as JSON; nullopt if it is not UTF-8.
std::optional<std::string> json_of(const std::string& text);

/// A number as JSON, which parses to the same number.
std::string json_of(double number);

/// A name quoted as in JSON, shortened to fit one line of a message.
std::string in_quotes(std::string_view name);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/json.ipp>
#endif
