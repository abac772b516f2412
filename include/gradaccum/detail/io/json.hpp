// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// A name as JSON writes it, so that it can be shown in one line of a message.
inline std::string in_quotes(std::string_view name) {
  return nlohmann::json(name.substr(0, 200)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Goes through a text and notices what nlohmann's parser lets pass: the last of two equal names would win, and depth
/// has no end. A pass of its own, since a parser with a callback takes quadratic time.
class JsonChecks : public nlohmann::json_sax<nlohmann::json> {
 public:
  static constexpr std::size_t max_values = 12'000'000;

  JsonChecks(std::size_t max_depth, const std::string& what) : max_depth_(max_depth), what_(what) {}

  bool start_object(std::size_t /*size*/) override { return open(); }
  bool start_array(std::size_t /*size*/) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (!open_.back().insert(name).second)
      throw std::runtime_error(what_ + ": its JSON must have every name once, got " + in_quotes(name) + " twice");
    return true;
  }
  bool parse_error(std::size_t byte, const std::string& /*token*/, const nlohmann::json::exception& error) override {
    if (dynamic_cast<const nlohmann::json::out_of_range*>(&error))
      throw std::runtime_error(what_ + ": its JSON must have no numbers beyond those of a double");
    throw std::runtime_error(what_ + ": must be JSON in UTF-8, got what is none at byte " + std::to_string(byte));
  }

  bool null() override { return count(); }
  bool boolean(bool /*value*/) override { return count(); }
  bool number_integer(number_integer_t /*value*/) override { return count(); }
  bool number_unsigned(number_unsigned_t /*value*/) override { return count(); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return count(); }
  bool string(string_t& /*value*/) override { return count(); }
  bool binary(binary_t& /*value*/) override { return count(); }

 private:
  bool open() {
    if (open_.size() == max_depth_)
      throw std::runtime_error(what_ + ": its JSON must not be nested deeper than " + std::to_string(max_depth_));
    open_.emplace_back();
    return count();
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  /// A value takes some 50 bytes, and in a text as few as two.
  bool count() {
    if (++values_ > max_values)
      throw std::runtime_error(what_ + ": its JSON must have at most " + std::to_string(max_values) + " values");
    return true;
  }

  std::size_t max_depth_, values_ = 0;
  const std::string& what_;
  std::vector<std::set<std::string>> open_;  // the names of each object that is open; an array has none
};

/// One JSON value and nothing after it, nested to `max_depth` at most, every name once. `what`, a path say, begins the
/// message of the `std::runtime_error` that it throws.
inline nlohmann::json parse_json(std::string_view text, std::size_t max_depth, const std::string& what) {
  // To nlohmann's parser a zero is the end of the text.
  if (const auto zero = text.find('\0'); zero != text.npos)
    throw std::runtime_error(what + ": must be JSON in UTF-8, got a zero at byte " + std::to_string(zero + 1));
  JsonChecks checks(max_depth, what);
  nlohmann::json::sax_parse(text.begin(), text.end(), &checks);
  return nlohmann::json::parse(text.begin(), text.end());
}

}  // namespace gradaccum::detail
