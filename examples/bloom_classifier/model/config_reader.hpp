// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace bloom {

/// Errors of a configuration: where it is from, what must hold, what was got.
struct ConfigLimits {
  std::string source;

  template <class... Values>
  [[noreturn]] void fail(const std::string& requirement, const Values&... got) const {
    std::string values;
    ((values += (values.empty() ? "" : " and ") + text_of(got)), ...);
    throw std::runtime_error(source + ": " + requirement + ", got " + shortened(values));
  }
  template <class... Values>
  void require(bool holds, const std::string& requirement, const Values&... got) const {
    if (!holds) fail(requirement, got...);
  }
  template <class Number>
  void within(const std::string& name, Number value, std::type_identity_t<Number> least,
              std::type_identity_t<Number> most) const {
    const auto range = "[" + nlohmann::json(least).dump() + ", " + nlohmann::json(most).dump() + "]";
    require(value >= least && value <= most, name + " must be in " + range, value);  // NaN is not
  }

  /// A value may be megabytes.
  static std::string shortened(const std::string& text) {
    constexpr std::size_t shown = 200;
    return text.size() <= shown ? text : text.substr(0, shown) + "...";
  }

 private:
  static std::string text_of(const nlohmann::json& json) {
    return json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  }
};

/// One JSON object and nothing after it, not deep.
inline nlohmann::json parse_config(std::string_view text, const std::string& source) {
  const auto not_deep = [&](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    constexpr int deepest = 32;
    if (depth > deepest) throw std::runtime_error(source + ": its JSON must not be nested deeper than 32");
    return true;
  };
  try {
    return nlohmann::json::parse(text, not_deep);
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(source + ": must be valid JSON, got: " + ConfigLimits::shortened(error.what()));
  }
}

/// Takes values out of a config.json. A name that is absent, or null, leaves the value as it is; others are ignored.
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& json, std::string source) : json_(json), limits_{std::move(source)} {
    limits_.require(json.is_object(), "must be a JSON object", json);
  }

  void read(std::int64_t& value, const std::string& name, const std::string& alias = "") const {
    if (const auto* found = find(name, alias)) value = whole_number(*found, name);
  }
  void read(std::optional<std::int64_t>& value, const std::string& name) const {
    if (const auto* found = find(name)) value = whole_number(*found, name);
  }
  void read(double& value, const std::string& name) const {
    const auto* found = find(name);
    if (!found) return;
    limits_.require(found->is_number(), name + " must be a number", *found);
    value = found->get<double>();
  }
  void read(bool& value, const std::string& name) const {
    const auto* found = find(name);
    if (!found) return;
    limits_.require(found->is_boolean(), name + " must be true or false", *found);
    value = found->get<bool>();
  }

  /// As many as id2label has, or num_labels.
  void read_label_count(std::int64_t& value) const {
    read(value, "num_labels");
    const auto* labels = find("id2label");
    if (!labels) return;
    limits_.require(labels->is_object(), "id2label must be an object", *labels);
    const auto count = static_cast<std::int64_t>(labels->size());
    limits_.require(!find("num_labels") || value == count, "num_labels must be the size of id2label", value, count);
    value = count;
  }

  void require_text(const std::string& name, const std::string& text, bool if_absent = false) const {
    const auto* found = find(name);
    if (!found && if_absent) return;
    const auto requirement = name + " must be \"" + text + "\"";
    limits_.require(found && *found == text, requirement, found ? *found : nlohmann::json());
  }

 private:
  const nlohmann::json* find(const std::string& name) const {
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  const nlohmann::json* find(const std::string& name, const std::string& alias) const {
    const auto *found = find(name), *other = find(alias);
    if (found && other) limits_.require(*found == *other, name + " and " + alias + " must agree", *found, *other);
    return found ? found : other;
  }
  std::int64_t whole_number(const nlohmann::json& json, const std::string& name) const {
    const bool fits = json.is_number_integer() &&
                      !(json.is_number_unsigned() &&
                        json.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()});
    limits_.require(fits, name + " must be a whole number", json);
    return json.get<std::int64_t>();
  }

  const nlohmann::json& json_;
  ConfigLimits limits_;
};

}  // namespace bloom
