// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/text_file.hpp"

namespace bloom {

/// Builds a value from nlohmann's parser, with stricter rules: refuses duplicate names, of which the parser would keep
/// the last, and limits depth and number of values.
class JsonBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  using Json = nlohmann::json;
  static constexpr std::size_t max_depth = 16, max_values = std::size_t{1} << 23;

  explicit JsonBuilder(std::string where) : where_(std::move(where)) {}

  Json result() && { return std::move(root_); }

  bool start_object(std::size_t /*size*/) override { return open(Json::object()); }
  bool start_array(std::size_t /*size*/) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    const auto [member, is_new] = open_.back()->get_ref<Json::object_t&>().try_emplace(name);
    if (!is_new) data_error(where_, "its JSON must have every name once, got ", shown(name), " twice");
    member_ = &member->second;
    return true;
  }
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return false; }  // not in JSON
  bool parse_error(std::size_t byte, const std::string& /*token*/, const nlohmann::json::exception& /*e*/) override {
    data_error(where_, "must be JSON in UTF-8, got what is none at byte ", byte);
  }

 private:
  bool open(Json empty) {
    if (open_.size() == max_depth) data_error(where_, "its JSON must not be nested deeper than ", max_depth);
    add(std::move(empty));
    open_.push_back(last_);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  bool add(Json value) {
    if (++values_ > max_values) data_error(where_, "its JSON must have at most ", max_values, " values");
    if (open_.empty()) {
      last_ = &root_;
    } else if (open_.back()->is_object()) {
      last_ = member_;
    } else {
      open_.back()->push_back(nullptr);
      last_ = &open_.back()->back();
    }
    *last_ = std::move(value);
    return true;
  }

  std::string where_;
  Json root_;
  std::vector<Json*> open_;  // open arrays and objects, the innermost last
  Json* member_ = nullptr;   // the last named member
  Json* last_ = nullptr;     // the last added value
  std::size_t values_ = 0;
};

/// Parses one JSON value with nothing after it. Errors begin with `where`.
inline nlohmann::json parse_json(std::string_view text, const std::string& where) {
  // nlohmann's parser would end at a zero.
  if (const auto zero = text.find('\0'); zero != text.npos)
    data_error(where, "must be JSON in UTF-8, got a zero at byte ", zero + 1);
  JsonBuilder builder(where);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return std::move(builder).result();
}

}  // namespace bloom
