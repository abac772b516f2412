// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/manifest_text.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// JSON to a manifest, believing nothing.
class ManifestReader {
 public:
  explicit ManifestReader(const std::string& what) : what_(what) {}

  Manifest read(std::string_view text) const {
    if (text.size() > Manifest::max_bytes)
      fail("must have at most " + std::to_string(Manifest::max_bytes) + " bytes", text.size());
    const auto json = parse_json(text, 3, what_);
    check_crc32(text_in(json, "crc32"), text);
    check_format(json);
    only(json, {"crc32", "format", "format_version", "gradaccum", "libtorch", "files", "values"});
    Manifest manifest;
    manifest.gradaccum = text_in(json, "gradaccum");
    manifest.libtorch = text_in(json, "libtorch");
    for (const auto& [name, file] : object_in(json, "files").items()) manifest.files[name] = file_of(name, file);
    for (const auto& [name, value] : object_in(json, "values").items()) manifest.values[name] = value_of(name, value);
    return manifest;
  }

 private:
  using Json = nlohmann::json;

  [[noreturn]] void fail(const std::string& requirement, const Json& got) const {
    auto shown = got.dump(-1, ' ', true);  // in ASCII, so that it can be cut anywhere
    if (shown.size() > 200) shown = shown.substr(0, 200) + "...";
    throw std::runtime_error(what_ + ": " + requirement + ", got " + shown);
  }

  const Json& in(const Json& object, const char* name) const {
    if (!object.is_object()) fail("must be an object", object);
    const auto found = object.find(name);
    if (found == object.end()) fail(std::string("must have an entry \"") + name + "\"", object);
    return *found;
  }
  std::string text_in(const Json& object, const char* name) const {
    const auto& json = in(object, name);
    if (!json.is_string()) fail(std::string("\"") + name + "\" must be a text", json);
    return json.get<std::string>();
  }
  const Json& object_in(const Json& object, const char* name) const {
    const auto& json = in(object, name);
    if (!json.is_object()) fail(std::string("\"") + name + "\" must be an object", json);
    return json;
  }
  void only(const Json& object, std::initializer_list<std::string_view> names) const {
    for (const auto& entry : object.items())
      if (std::find(names.begin(), names.end(), entry.key()) == names.end())
        fail("must have no other entries than this gradaccum knows", entry.key());
  }

  std::uint32_t crc32_in(const Json& object) const {
    const auto digits = text_in(object, "crc32");
    std::uint32_t crc = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), crc, 16);
    if (crc32_text(crc) != digits) fail("\"crc32\" must be eight digits 0-9 a-f", digits);
    return crc;
  }

  void check_crc32(const std::string& digits, std::string_view text) const {
    const auto at = text.find(digits);
    if (at == text.npos || digits.size() != 8) fail("\"crc32\" must be eight digits 0-9 a-f", digits);
    const auto before = crc32("00000000", 8, crc32(text.data(), at));
    const auto computed = crc32_text(crc32(text.data() + at + 8, text.size() - at - 8, before));
    if (computed != digits) fail("must be as it was written, with the CRC-32 " + digits, computed);
  }

  void check_format(const Json& json) const {
    const auto format = text_in(json, "format");
    if (format != manifest_format) fail(std::string("\"format\" must be \"") + manifest_format + "\"", format);
    const auto& version = in(json, "format_version");
    if (version != 1 || !version.is_number_unsigned())
      throw std::runtime_error(what_ + ": \"format_version\" must be 1, got " + version.dump() +
                               ": read it with the gradaccum that wrote it, or a newer one");
  }

  Manifest::File file_of(const std::string& name, const Json& json) const {
    if (!is_file_name(name)) fail("\"files\" must have plain names (A-Z a-z 0-9 _ . -, no dot in front)", name);
    const auto& bytes = in(json, "bytes");
    if (!bytes.is_number_unsigned()) fail("the \"bytes\" of " + name + " must be a whole number >= 0", bytes);
    only(json, {"bytes", "crc32"});
    return {bytes.get<std::uint64_t>(), crc32_in(json)};
  }

  Manifest::Value value_of(const std::string& name, const Json& json) const {
    if (json.is_boolean()) return json.get<bool>();
    if (json.is_string()) return json.get<std::string>();
    if (json.is_number_float()) return json.get<double>();
    if (json.is_object()) return not_finite(name, json);
    const bool is_large = json.is_number_unsigned() && json.get<std::uint64_t>() >> 63 != 0;
    if (!json.is_number_integer() || is_large)
      fail("the value " + in_quotes(name) + " must be true or false, a 64-bit integer, a double or a text", json);
    return json.get<std::int64_t>();
  }

  double not_finite(const std::string& name, const Json& json) const {
    only(json, {"double"});
    const auto text = text_in(json, "double");
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text != "-inf") fail("the value " + in_quotes(name) + " must be \"nan\", \"inf\" or \"-inf\"", json);
    return -std::numeric_limits<double>::infinity();
  }

  const std::string& what_;
};

/// `what`, a path say, begins the message of the `std::runtime_error` that it throws.
inline Manifest manifest_of(std::string_view text, const std::string& what) { return ManifestReader(what).read(text); }

}  // namespace gradaccum::detail
