// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <variant>

namespace gradaccum::detail {

inline constexpr std::string_view state_format = "gradaccum training state";

/// The contents of a state or another folder of files: files with their sizes and checksums, and named values.
///
/// The manifest is a readable JSON file. Its first entry, "crc32", is the CRC-32 of the file with its own eight digits
/// set to zeros. JSON lacks non-finite doubles: they are {"double": "nan"}, "inf" or "-inf", and the payload of a NaN
/// is lost. To edit it in Python:
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

  std::string format{state_format};  ///< the kind of folder
  std::map<std::string, Value> values;
  std::map<std::string, File> files;  ///< plain names: A-Z a-z 0-9 _ . - and no leading dot
  std::string gradaccum, libtorch;    ///< the versions that wrote it
};

inline constexpr const char* manifest_name = "manifest.json";

/// Formats a CRC-32 as eight hexadecimal digits.
std::string crc32_text(std::uint32_t crc);

/// Returns true for a name that stays inside its directory on any file system and is not the manifest's own.
bool is_file_name(std::string_view name);

/// Throws `std::runtime_error` if the text could not be read back.
std::string text_of(const Manifest& manifest);

/// Parses an untrusted manifest of kind `format`. Throws `std::runtime_error`; messages begin with `what`, for example
/// a path.
Manifest manifest_of(std::string_view text, const std::string& what, std::string_view format = state_format);

/// Writes a new file and syncs it. Throws `std::runtime_error` with the file's path, as does read_manifest().
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
Manifest read_manifest(const std::filesystem::path& folder, std::string_view format = state_format);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/manifest.ipp>
#endif
