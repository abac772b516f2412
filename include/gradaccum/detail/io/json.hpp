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

/// A value of JSON. A whole number is a `std::uint64_t`, but a `std::int64_t` with a minus; any other is a `double`.
struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string, Array, Object> value = nullptr;

  /// nullptr where it is of another kind.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&value);
  }
  /// `null`, `boolean`, `number`, `string`, `array`, `object`
  const char* kind() const;
  /// As JSON in one line of ASCII, which can be cut anywhere.
  std::string text() const;
};

/// One JSON value and nothing after it, nested to `max_depth` at most, every name once. `what`, a path say, begins the
/// message of the `std::runtime_error` that it throws.
Json parse_json(std::string_view text, std::size_t max_depth, const std::string& what);

/// A text as JSON; nothing where it is not UTF-8.
std::optional<std::string> json_of(const std::string& text);

/// A number as JSON. It is read again as it was.
std::string json_of(double number);

/// A name as JSON writes it, so that it can be shown in one line of a message.
std::string in_quotes(std::string_view name);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/json.ipp>
#endif
