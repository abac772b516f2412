// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>

#include "data/text_file.hpp"

namespace bloom {

/// Checks parts of a JSON file. Errors begin with `where`, the file's path.
class JsonReader {
 public:
  using Json = nlohmann::json;
  using Names = std::initializer_list<const char*>;

  explicit JsonReader(std::string where) : where_(std::move(where)) {}

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    data_error(where_, parts...);
  }

  static std::string shown_json(const Json& value) {
    return shown(value.dump(-1, ' ', false, Json::error_handler_t::replace));
  }

  void require_object(const Json& value, const std::string& what) const {
    if (!value.is_object()) fail(what, " must be an object, got ", shown_json(value));
  }

  /// Requires an object with the needed members, and no others than the allowed ones, whose meaning would be unknown.
  void require_members(const Json& object, const std::string& what, Names needed, Names allowed) const {
    require_object(object, what);
    for (const auto* name : needed)
      if (!object.contains(name)) fail(what, " must have a member '", name, "'");
    for (const auto& item : object.items()) {
      const auto is_name = [&](const char* name) { return item.key() == name; };
      if (std::none_of(needed.begin(), needed.end(), is_name) && std::none_of(allowed.begin(), allowed.end(), is_name))
        fail(what, " must not have a member ", shown(item.key()), ", which is not known here");
    }
  }

  template <class Number>
  void require_within(Number value, const std::string& what, std::type_identity_t<Number> least,
                      std::type_identity_t<Number> most) const {
    if (value >= least && value <= most) return;  // false for NaN
    fail(what, " must be in [", Json(least), ", ", Json(most), "], got ", Json(value));
  }

  const std::string& text(const Json& value, const std::string& what) const {
    if (!value.is_string()) fail(what, " must be a string, got ", shown_json(value));
    return value.get_ref<const std::string&>();
  }

  /// Requires a short text without control characters.
  void require_printable(const std::string& text, const std::string& what) const {
    constexpr std::size_t max_bytes = 200;
    const auto controls = [](char c) { return (c >= 0 && c < ' ') || c == '\x7f'; };
    if (text.empty() || text.size() > max_bytes || std::any_of(text.begin(), text.end(), controls))
      fail(what, " must be 1 to ", max_bytes, " bytes without control characters, got ", shown(text));
  }

  std::int64_t whole_number(const Json& value, const std::string& what) const {
    constexpr auto most = std::numeric_limits<std::int64_t>::max();
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > most))
      fail(what, " must be a whole number, got ", shown_json(value));
    return value.get<std::int64_t>();
  }

  double number(const Json& value, const std::string& what) const {
    if (!value.is_number()) fail(what, " must be a number, got ", shown_json(value));
    return value.get<double>();
  }

  bool flag(const Json& value, const std::string& what) const {
    if (!value.is_boolean()) fail(what, " must be true or false, got ", shown_json(value));
    return value.get<bool>();
  }

  /// Returns a Boolean member; false if it is missing or null.
  bool flag(const Json& object, const std::string& what, const char* name) const {
    const auto value = object.value(name, Json());
    return !value.is_null() && flag(value, what + "." + name);
  }

 private:
  std::string where_;
};

}  // namespace bloom
