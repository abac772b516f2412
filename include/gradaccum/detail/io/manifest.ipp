// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/manifest.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string crc32_text(std::uint32_t crc) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", crc);
  return digits;
}

GRADACCUM_INLINE bool is_file_name(std::string_view name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-';
  };
  return !name.empty() && name.size() <= 255 && name.front() != '.' && name != manifest_name &&
         std::all_of(name.begin(), name.end(), is_plain);
}

GRADACCUM_INLINE std::string quoted(const std::string& text) {
  if (auto json = json_of(text)) return *std::move(json);
  throw std::runtime_error("manifest.json: texts and names must be UTF-8, got " + in_quotes(text));
}

/// Writes an object from names and JSON values, one entry a line.
GRADACCUM_INLINE std::string lines_of(const std::vector<std::pair<std::string, std::string>>& entries,
                                      std::size_t depth) {
  std::string text;
  for (auto& [name, json] : entries)
    text += (text.empty() ? "\n" : ",\n") + std::string(2 * depth, ' ') + quoted(name) + ": " + json;
  return text.empty() ? "{}" : "{" + text + "\n" + std::string(2 * (depth - 1), ' ') + "}";
}

GRADACCUM_INLINE std::string json_of_value(const Manifest::Value& value) {
  if (auto* const text = std::get_if<std::string>(&value)) return quoted(*text);
  if (auto* const flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (auto* const whole = std::get_if<std::int64_t>(&value)) return std::to_string(*whole);
  const auto number = std::get<double>(value);
  if (std::isfinite(number)) return json_of(number);
  return lines_of({{"double", std::isnan(number) ? "\"nan\"" : number > 0 ? "\"inf\"" : "\"-inf\""}}, 3);
}

GRADACCUM_INLINE std::string text_of(const Manifest& manifest) {
  std::vector<std::pair<std::string, std::string>> files, values;
  for (const auto& [name, file] : manifest.files) {
    if (!is_file_name(name))
      throw std::runtime_error("manifest.json: files must have plain names, got " + in_quotes(name));
    files.emplace_back(name,
                       lines_of({{"bytes", std::to_string(file.bytes)}, {"crc32", quoted(crc32_text(file.crc32))}}, 3));
  }
  for (const auto& [name, value] : manifest.values) values.emplace_back(name, json_of_value(value));
  auto text = lines_of({{"crc32", quoted("00000000")},
                        {"format", quoted(manifest.format)},
                        {"format_version", "1"},
                        {"gradaccum", quoted(manifest.gradaccum)},
                        {"libtorch", quoted(manifest.libtorch)},
                        {"files", lines_of(files, 2)},
                        {"values", lines_of(values, 2)}},
                       1) +
              "\n";
  if (text.size() > Manifest::max_bytes)
    throw std::runtime_error("manifest.json: must have at most 64 MiB, got " + std::to_string(text.size()) + " bytes");
  return text.replace(text.find("00000000"), 8, crc32_text(crc32(text.data(), text.size())));
}

/// Turns untrusted JSON into a manifest.
class ManifestReader {
 public:
  ManifestReader(const std::string& what, std::string_view format) : what_(what), format_(format) {}

  Manifest read(std::string_view text) const {
    if (text.size() > Manifest::max_bytes)
      fail("must have at most " + std::to_string(Manifest::max_bytes) + " bytes", Json{std::uint64_t{text.size()}});
    const auto json = parse_json(text, 3, what_);
    check_crc32(text_in(json, "crc32"), text);
    check_format(json);
    only(json, {"crc32", "format", "format_version", "gradaccum", "libtorch", "files", "values"});
    Manifest manifest;
    manifest.format = format_;
    manifest.gradaccum = text_in(json, "gradaccum");
    manifest.libtorch = text_in(json, "libtorch");
    for (const auto& [name, file] : object_in(json, "files")) manifest.files[name] = file_of(name, file);
    for (const auto& [name, value] : object_in(json, "values")) manifest.values[name] = value_of(name, value);
    return manifest;
  }

 private:
  [[noreturn]] void fail(const std::string& requirement, const Json& got) const {
    auto shown = got.text();
    if (shown.size() > 200) shown = shown.substr(0, 200) + "...";
    throw std::runtime_error(what_ + ": " + requirement + ", got " + shown);
  }

  const Json::Object& object(const Json& json, const std::string& what = "") const {
    if (const auto* const held = json.as<Json::Object>()) return *held;
    fail(what + "must be an object", json);
  }
  const Json& in(const Json& json, const std::string& name) const {
    const auto found = object(json).find(name);
    if (found == object(json).end()) fail("must have an entry \"" + name + "\"", json);
    return found->second;
  }
  const Json::Object& object_in(const Json& json, const std::string& name) const {
    return object(in(json, name), "\"" + name + "\" ");
  }
  const std::string& text_in(const Json& json, const std::string& name) const {
    const auto& found = in(json, name);
    if (const auto* const text = found.as<std::string>()) return *text;
    fail("\"" + name + "\" must be a text", found);
  }
  void only(const Json& json, std::initializer_list<std::string_view> names) const {
    for (const auto& [name, value] : object(json))
      if (std::find(names.begin(), names.end(), name) == names.end())
        fail("must have no other entries than this gradaccum knows", Json{name});
  }

  std::uint32_t crc32_in(const Json& json) const {
    const auto& digits = text_in(json, "crc32");
    std::uint32_t crc = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), crc, 16);
    if (crc32_text(crc) != digits) fail("\"crc32\" must be eight digits 0-9 a-f", Json{digits});
    return crc;
  }

  void check_crc32(const std::string& digits, std::string_view text) const {
    const auto at = text.find(digits);
    if (at == text.npos || digits.size() != 8) fail("\"crc32\" must be eight digits 0-9 a-f", Json{digits});
    const auto before = crc32("00000000", 8, crc32(text.data(), at));
    const auto computed = crc32_text(crc32(text.data() + at + 8, text.size() - at - 8, before));
    if (computed != digits) fail("must be as it was written, with the CRC-32 " + digits, Json{computed});
  }

  void check_format(const Json& json) const {
    const auto& format = text_in(json, "format");
    if (format != format_) fail("\"format\" must be \"" + format_ + "\"", Json{format});
    const auto& version = in(json, "format_version");
    const auto* const number = version.as<std::uint64_t>();
    if (!number || *number != 1)
      throw std::runtime_error(what_ + ": \"format_version\" must be 1, got " + version.text() +
                               ": read it with the gradaccum that wrote it, or a newer one");
  }

  Manifest::File file_of(const std::string& name, const Json& json) const {
    if (!is_file_name(name)) fail("\"files\" must have plain names (A-Z a-z 0-9 _ . -, no dot in front)", Json{name});
    const auto& bytes = in(json, "bytes");
    const auto* const number = bytes.as<std::uint64_t>();
    if (!number) fail("the \"bytes\" of " + name + " must be a whole number >= 0", bytes);
    only(json, {"bytes", "crc32"});
    return {*number, crc32_in(json)};
  }

  Manifest::Value value_of(const std::string& name, const Json& json) const {
    if (const auto* const flag = json.as<bool>()) return *flag;
    if (const auto* const text = json.as<std::string>()) return *text;
    if (const auto* const number = json.as<double>()) return *number;
    if (const auto* const negative = json.as<std::int64_t>()) return *negative;
    const auto* const whole = json.as<std::uint64_t>();
    if (whole && *whole >> 63 == 0) return static_cast<std::int64_t>(*whole);
    if (json.as<Json::Object>()) return not_finite(name, json);
    fail("the value " + in_quotes(name) + " must be true or false, a 64-bit integer, a double or a text", json);
  }

  double not_finite(const std::string& name, const Json& json) const {
    only(json, {"double"});
    const auto& text = text_in(json, "double");
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text != "-inf") fail("the value " + in_quotes(name) + " must be \"nan\", \"inf\" or \"-inf\"", json);
    return -std::numeric_limits<double>::infinity();
  }

  const std::string& what_;
  const std::string format_;
};

GRADACCUM_INLINE Manifest manifest_of(std::string_view text, const std::string& what, std::string_view format) {
  return ManifestReader(what, format).read(text);
}

GRADACCUM_INLINE void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  const auto text = text_of(manifest);
  OutputFile file(folder / manifest_name);
  file.write(text.data(), text.size());
  file.close();
}

GRADACCUM_INLINE Manifest read_manifest(const std::filesystem::path& folder, std::string_view format) {
  const auto path = folder / manifest_name;
  InputFile file(path);
  if (file.bytes() > Manifest::max_bytes)
    throw std::runtime_error(path.string() + ": must have at most 64 MiB, got " + std::to_string(file.bytes()) +
                             " bytes");
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  text.resize(file.read(text.data(), text.size()));
  return manifest_of(text, path.string(), format);
}

}  // namespace gradaccum::detail
