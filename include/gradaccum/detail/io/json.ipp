// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/json.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <nlohmann/json.hpp>

#include <stdexcept>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE const char* Json::kind() const {
  constexpr const char* kinds[] = {"null", "boolean", "number", "number", "number", "string", "array", "object"};
  return kinds[value.index()];
}

GRADACCUM_INLINE std::string ascii_json(const std::string& text) { return nlohmann::json(text).dump(-1, ' ', true); }

GRADACCUM_INLINE std::string Json::text() const {
  return std::visit(
      []<class T>(const T& held) -> std::string {
        std::string all;
        if constexpr (std::is_same_v<T, Array>) {
          for (auto& element : held) all += (all.empty() ? "" : ",") + element.text();
          return "[" + all + "]";
        } else if constexpr (std::is_same_v<T, Object>) {
          for (auto& [name, member] : held) all += (all.empty() ? "" : ",") + ascii_json(name) + ":" + member.text();
          return "{" + all + "}";
        } else if constexpr (std::is_same_v<T, std::string>) {
          return ascii_json(held);
        } else {
          return nlohmann::json(held).dump();
        }
      },
      value);
}

/// Builds a value from the events of nlohmann's parser. Rejects duplicate names, of which the parser would keep the
/// last, and nesting beyond `max_depth`, which the parser does not limit.
class JsonBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  static constexpr std::size_t max_values = 12'000'000;

  JsonBuilder(std::size_t max_depth, const std::string& what) : max_depth_(max_depth), what_(what) {}

  Json result() && { return std::move(root_); }

  bool start_object(std::size_t /*size*/) override { return open(Json::Object()); }
  bool start_array(std::size_t /*size*/) override { return open(Json::Array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    const auto [member, is_new] = std::get<Json::Object>(open_.back()->value).try_emplace(name);
    if (!is_new)
      throw std::runtime_error(what_ + ": its JSON must have every name once, got " + in_quotes(name) + " twice");
    member_ = &member->second;
    return true;
  }
  bool parse_error(std::size_t byte, const std::string& /*token*/, const nlohmann::json::exception& error) override {
    if (dynamic_cast<const nlohmann::json::out_of_range*>(&error))
      throw std::runtime_error(what_ + ": its JSON must have no numbers beyond those of a double");
    throw std::runtime_error(what_ + ": must be JSON in UTF-8, got what is none at byte " + std::to_string(byte));
  }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return false; }  // JSON has no binary values

 private:
  template <class T>
  bool open(T empty) {
    if (open_.size() == max_depth_)
      throw std::runtime_error(what_ + ": its JSON must not be nested deeper than " + std::to_string(max_depth_));
    open_.push_back(&place());
    open_.back()->value = std::move(empty);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  template <class T>
  bool add(T value) {
    place().value = std::move(value);
    return true;
  }

  /// Returns the slot for the next value. Limits their number, as two bytes of text may become a value of 50.
  Json& place() {
    if (++values_ > max_values)
      throw std::runtime_error(what_ + ": its JSON must have at most " + std::to_string(max_values) + " values");
    if (open_.empty()) return root_;
    auto* const array = std::get_if<Json::Array>(&open_.back()->value);
    return array ? array->emplace_back() : *member_;
  }

  std::size_t max_depth_, values_ = 0;
  const std::string& what_;
  Json root_;
  std::vector<Json*> open_;  // the open containers, outermost first; an open one never moves
  Json* member_ = nullptr;   // the slot of the last name
};

GRADACCUM_INLINE Json parse_json(std::string_view text, std::size_t max_depth, const std::string& what) {
  // nlohmann's parser takes a zero byte for the end of the text.
  if (const auto zero = text.find('\0'); zero != text.npos)
    throw std::runtime_error(what + ": must be JSON in UTF-8, got a zero at byte " + std::to_string(zero + 1));
  JsonBuilder builder(max_depth, what);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return std::move(builder).result();
}

GRADACCUM_INLINE std::optional<std::string> json_of(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    return std::nullopt;
  }
}

GRADACCUM_INLINE std::string json_of(double number) { return nlohmann::json(number).dump(); }

GRADACCUM_INLINE std::string in_quotes(std::string_view name) {
  return nlohmann::json(name.substr(0, 200)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace gradaccum::detail
