// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/safetensors_header.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include <gradaccum/impl/begin.ipp>

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

GRADACCUM_INLINE std::size_t safetensors_dtype_rank(std::string_view dtype) {
  const auto& all = safetensors_dtype_bits;
  return static_cast<std::size_t>(
      std::find_if(all.begin(), all.end(), [dtype](auto& known) { return known.first == dtype; }) - all.begin());
}

/// Validates a header part by part.
class SafetensorsChecks {
 public:
  static constexpr std::size_t max_header = 100'000'000;  // bytes, as in the reference implementation
  static constexpr std::size_t max_tensors = 1'000'000, max_name = 4096, max_dimensions = 64;

  explicit SafetensorsChecks(const std::string& what) : what_(what) {}

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) throw std::runtime_error((what_ + ": " + ... + text_of(parts)));
  }

  std::map<std::string, std::string> metadata_of(const Json& value) const {
    const auto* const object = value.as<Json::Object>();
    require(object, "__metadata__ must be an object");
    std::map<std::string, std::string> metadata;
    for (auto& [key, held] : *object) {
      const auto* const text = held.as<std::string>();
      require(text, "__metadata__ must have texts only, got another value for ", in_quotes(key));
      metadata.emplace_hint(metadata.end(), key, *text);
    }
    return metadata;
  }

  SafetensorsEntry entry_of(const std::string& name, const Json& value) const {
    const auto shown = "the tensor " + in_quotes(name);
    require(name.size() <= max_name, shown, " must have a name of at most 4096 bytes, got ", name.size());
    const auto* const object = value.as<Json::Object>();
    require(object && object->size() == 3 && object->contains("dtype") && object->contains("shape") &&
                object->contains("data_offsets"),
            shown, " must have dtype, shape and data_offsets, and nothing else");
    const auto* const dtype = object->at("dtype").as<std::string>();
    require(dtype && safetensors_dtype_rank(*dtype) < safetensors_dtype_bits.size(), shown,
            " must have a dtype of safetensors, got ", object->at("dtype").text().substr(0, 60));
    SafetensorsEntry entry{.dtype = *dtype};
    const auto sizes = numbers_of(object->at("shape"), shown + ": shape");
    require(sizes.size() <= max_dimensions, shown, " must have at most 64 dimensions, got ", sizes.size());
    entry.shape.assign(sizes.begin(), sizes.end());
    const auto offsets = numbers_of(object->at("data_offsets"), shown + ": data_offsets");
    require(offsets.size() == 2 && offsets[0] <= offsets[1], shown, " must have a begin and an end that is not before");
    entry.begin = offsets[0];
    entry.end = offsets[1];
    check_size(entry, shown);
    return entry;
  }

  void check_offsets(const std::map<std::string, SafetensorsEntry>& tensors, std::uint64_t data_size) const {
    using Named = const std::pair<const std::string, SafetensorsEntry>;
    std::vector<Named*> order;
    for (auto& named : tensors) order.push_back(&named);
    std::sort(order.begin(), order.end(), [](Named* a, Named* b) {
      return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
    });
    std::uint64_t end = 0;
    for (auto* named : order) {
      require(named->second.begin == end, "the tensor ", in_quotes(named->first),
              " must begin where the one before ends, at ", end, ", got ", named->second.begin);
      end = named->second.end;
    }
    require(end == data_size, "its tensors must be all of its data, ", data_size, " bytes, got ", end);
  }

 private:
  static std::string text_of(std::string_view text) { return std::string(text); }
  static std::string text_of(std::uint64_t number) { return std::to_string(number); }

  std::vector<std::uint64_t> numbers_of(const Json& value, const std::string& shown) const {
    const auto* const array = value.as<Json::Array>();
    require(array, shown, " must be an array");
    std::vector<std::uint64_t> numbers;
    for (auto& element : *array) {
      const auto* const number = element.as<std::uint64_t>();
      require(number && *number <= std::numeric_limits<std::int64_t>::max(), shown,
              " must have whole numbers from 0 to 2^63 - 1 only");
      numbers.push_back(*number);
    }
    return numbers;
  }

  void check_size(const SafetensorsEntry& entry, const std::string& shown) const {
    std::int64_t bits = safetensors_dtype_bits[safetensors_dtype_rank(entry.dtype)].second;
    bool is_empty = false;
    for (auto size : entry.shape) {
      is_empty = is_empty || size == 0;  // an empty tensor's strides are still products of the other sizes
      require(!__builtin_mul_overflow(bits, std::max<std::int64_t>(size, 1), &bits), shown,
              " must have fewer than 2^63 bits");
    }
    if (is_empty) bits = 0;
    require(bits % 8 == 0, shown, " must end at a whole byte");
    const auto bytes = static_cast<std::uint64_t>(bits / 8);
    require(bytes == entry.end - entry.begin, shown, " must have the bytes of its shape and dtype, ", bytes, ", got ",
            entry.end - entry.begin);
  }

  const std::string& what_;
};

GRADACCUM_INLINE SafetensorsHeader SafetensorsHeaderReader::read_file(std::string_view file) const {
  const auto size = size_of_header(file.substr(0, 8), file.size());
  auto header = read(file.substr(8, size), file.size() - 8 - size);
  header.data_begin = 8 + size;
  return header;
}

GRADACCUM_INLINE std::uint64_t SafetensorsHeaderReader::size_of_header(std::string_view first,
                                                                       std::uint64_t file_size) const {
  const SafetensorsChecks checks(what_);
  checks.require(first.size() == 8 && file_size >= 8, "must have at least 8 bytes, got ", file_size);
  std::uint64_t size = 0;
  for (unsigned i = 0; i < 8; ++i) size |= std::uint64_t{static_cast<unsigned char>(first[i])} << (8 * i);
  checks.require(size <= checks.max_header, "its header must have at most 100000000 bytes, got ", size);
  checks.require(size <= file_size - 8, "its header must end with the file or before, got ", size, " bytes of ",
                 file_size - 8);
  return size;
}

GRADACCUM_INLINE SafetensorsHeader SafetensorsHeaderReader::read(std::string_view text, std::uint64_t data_size) const {
  const SafetensorsChecks checks(what_);
  checks.require(text.size() <= checks.max_header, "its header must have at most 100000000 bytes, got ", text.size());
  checks.require(text.starts_with('{'), "its header must begin with {");
  const auto json = parse_json(text, 3, what_);
  const auto& object = *json.as<Json::Object>();
  checks.require(object.size() <= checks.max_tensors, "must have at most 1000000 tensors, got ", object.size());
  SafetensorsHeader header;
  for (auto& [name, value] : object)
    if (name == "__metadata__")
      header.metadata = checks.metadata_of(value);
    else
      header.tensors.emplace_hint(header.tensors.end(), name, checks.entry_of(name, value));
  checks.check_offsets(header.tensors, data_size);
  return header;
}

/// Orders tensors by dtype, then by name.
GRADACCUM_INLINE bool is_written_before(const NamedSafetensorsEntry& a, const NamedSafetensorsEntry& b) {
  const auto rank_a = safetensors_dtype_rank(a.second.dtype), rank_b = safetensors_dtype_rank(b.second.dtype);
  return rank_a != rank_b ? rank_a < rank_b : a.first < b.first;
}

std::string numbers_as_json(const auto& numbers) {
  std::string text;
  for (auto number : numbers) text.append(text.empty() ? "[" : ",").append(std::to_string(number));
  return text.empty() ? "[]" : text + "]";
}

/// The header's JSON, padded with spaces so that the data begins at a multiple of 8.
GRADACCUM_INLINE std::string safetensors_json(const std::vector<NamedSafetensorsEntry>& tensors,
                                              const std::map<std::string, std::string>& metadata,
                                              const std::string& what) {
  std::string text;
  const auto add = [](std::string& to, const std::string& json) { to += (to.empty() ? "{" : ",") + json; };
  const auto quoted = [&what](const std::string& name) {
    auto json = json_of(name);
    if (!json) throw std::runtime_error(what + ": names and metadata must be UTF-8");
    return *std::move(json);
  };
  std::string texts;
  for (auto& [key, value] : metadata) add(texts, quoted(key) + ":" + quoted(value));
  if (!metadata.empty()) add(text, "\"__metadata__\":" + texts + "}");
  for (auto& [name, entry] : tensors)
    add(text, quoted(name) + ":{\"dtype\":" + quoted(entry.dtype) + ",\"shape\":" + numbers_as_json(entry.shape) +
                  ",\"data_offsets\":" + numbers_as_json(std::array{entry.begin, entry.end}) + "}");
  text += text.empty() ? "{}" : "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

GRADACCUM_INLINE std::string lay_out_safetensors(std::vector<NamedSafetensorsEntry>& tensors,
                                                 const std::map<std::string, std::string>& metadata,
                                                 const std::string& what) {
  std::sort(tensors.begin(), tensors.end(), is_written_before);
  std::uint64_t end = 0;
  for (auto& [name, entry] : tensors) {
    const auto size = entry.end - entry.begin;
    entry.begin = std::exchange(end, end + size);
    entry.end = end;
  }
  const auto text = safetensors_json(tensors, metadata, what);
  SafetensorsHeaderReader(what).read(text, end);
  std::string size(8, '\0');
  for (unsigned i = 0; i < 8; ++i) size[i] = static_cast<char>(text.size() >> (8 * i));
  return size + text;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
