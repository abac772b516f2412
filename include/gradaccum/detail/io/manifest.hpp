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

/// What a state, or another folder of files, consists of: files with their sizes and checksums, and numbers and texts
/// with names.
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

  std::string format{state_format};  ///< what it is the manifest of
  std::map<std::string, Value> values;
  std::map<std::string, File> files;  ///< with plain names: A-Z a-z 0-9 _ . - and no dot in front
  std::string gradaccum, libtorch;    ///< the versions that wrote it
};

inline constexpr const char* manifest_name = "manifest.json";

/// Eight digits.
std::string crc32_text(std::uint32_t crc);

/// A name that cannot lead out of its directory, on any file system, and is not the manifest's own.
bool is_file_name(std::string_view name);

/// Throws `std::runtime_error` for what could not be read again.
std::string text_of(const Manifest& manifest);

/// Believes nothing. `what`, a path say, begins the message of the `std::runtime_error` that it throws. `format`: what
/// it must be the manifest of.
Manifest manifest_of(std::string_view text, const std::string& what, std::string_view format = state_format);

/// Synced, as a new file. Throws `std::runtime_error` with the file's path, as the next does.
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
Manifest read_manifest(const std::filesystem::path& folder, std::string_view format = state_format);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/manifest.ipp>
#endif
