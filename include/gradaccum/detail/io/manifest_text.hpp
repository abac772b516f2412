// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>

namespace gradaccum::detail {

/// What a state consists of: files with their sizes and checksums, and numbers and texts with names.
///
/// It is a JSON file that a person can read. "crc32", its first entry, is the CRC-32 of the file's bytes, these eight
/// digits being zeros. A double that is not finite, which JSON lacks, is {"double": "nan"}, "inf" or "-inf"; the bits
/// of a NaN are not kept. In Python:
///
///    m = json.load(open("manifest.json"))
///    m["values"]["lr"], m["crc32"] = 0.01, "00000000"
///    text = json.dumps(m, indent=2)
///    text = text.replace("00000000", f"{zlib.crc32(text.encode()):08x}", 1)
///    open("manifest.json", "w").write(text)
struct Manifest {
  using Value = std::variant<bool, std::int64_t, double, std::string>;
  struct File {
    std::uint64_t bytes = 0;
    std::uint32_t crc32 = 0;
    bool operator==(const File&) const = default;
  };

  static constexpr std::size_t max_bytes = std::size_t{64} << 20;

  std::map<std::string, Value> values;
  std::map<std::string, File> files;  ///< with plain names: A-Z a-z 0-9 _ . - and no dot in front
  std::string gradaccum, libtorch;    ///< the versions that wrote it
};

inline constexpr const char* manifest_name = "manifest.json";
inline constexpr const char* manifest_format = "gradaccum training state";

inline std::string crc32_text(std::uint32_t crc) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", crc);
  return digits;
}

/// A name that cannot lead out of its directory, on any file system, and is not the manifest's own.
inline bool is_file_name(std::string_view name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-';
  };
  return !name.empty() && name.size() <= 255 && name.front() != '.' && name != manifest_name &&
         std::all_of(name.begin(), name.end(), is_plain);
}

inline nlohmann::ordered_json json_of(double value) {
  if (std::isfinite(value)) return value;
  auto json = nlohmann::ordered_json::object();
  json["double"] = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  return json;
}
inline nlohmann::ordered_json json_of(bool value) { return value; }
inline nlohmann::ordered_json json_of(std::int64_t value) { return value; }
inline nlohmann::ordered_json json_of(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    throw std::runtime_error("manifest.json: texts and names must be UTF-8, got " + in_quotes(text));
  }
  return text;
}

inline nlohmann::ordered_json json_of(const std::map<std::string, Manifest::File>& files) {
  auto json = nlohmann::ordered_json::object();
  for (const auto& [name, file] : files) {
    if (!is_file_name(name))
      throw std::runtime_error("manifest.json: files must have plain names, got " + in_quotes(name));
    json[name]["bytes"] = file.bytes;
    json[name]["crc32"] = crc32_text(file.crc32);
  }
  return json;
}

inline nlohmann::ordered_json json_of(const std::map<std::string, Manifest::Value>& values) {
  auto json = nlohmann::ordered_json::object();
  for (const auto& [name, value] : values)
    json[json_of(name)] = std::visit([](const auto& it) { return json_of(it); }, value);
  return json;
}

/// Throws `std::runtime_error` for what could not be read again.
inline std::string text_of(const Manifest& manifest) {
  nlohmann::ordered_json json;
  json["crc32"] = "00000000";
  json["format"] = manifest_format;
  json["format_version"] = 1;
  json["gradaccum"] = json_of(manifest.gradaccum);
  json["libtorch"] = json_of(manifest.libtorch);
  json["files"] = json_of(manifest.files);
  json["values"] = json_of(manifest.values);
  auto text = json.dump(2) + "\n";
  if (text.size() > Manifest::max_bytes)
    throw std::runtime_error("manifest.json: must have at most 64 MiB, got " + std::to_string(text.size()) + " bytes");
  return text.replace(text.find("00000000"), 8, crc32_text(crc32(text.data(), text.size())));
}

}  // namespace gradaccum::detail
