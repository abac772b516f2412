// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/files.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum::detail {

inline constexpr std::string_view state_format = "gradaccum training state";

/// The contents of a state or another folder of files: files with their sizes and checksums, and named values.
///
/// The manifest is a readable JSON file. Its first entry, "crc32", is the CRC-32 of the file with its own eight digits
/// set to zeros. JSON lacks non-finite doubles: they are {"double": "nan"}, "inf" or "-inf", and the payload of a NaN
/// is lost.
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

/// Formats a CRC-32 as eight hexadecimal digits; `crc_of` computes it from a text first.
std::string crc32_text(std::uint32_t crc);
std::string crc_of(std::string_view text);

/// Returns true for a name that stays inside its directory on any file system and is not the manifest's own.
bool is_file_name(std::string_view name);

/// Throws if the text could not be read back.
std::string text_of(const Manifest& manifest);

/// Parses an untrusted manifest of kind `format`. Throws `std::runtime_error`; messages begin with `what`, for example
/// a path.
Manifest manifest_of(std::string_view text, const std::string& what, std::string_view format = state_format);

/// Writes a new file and syncs it. Throws `std::runtime_error` with the file's path, as does read_manifest().
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
Manifest read_manifest(const std::filesystem::path& folder, std::string_view format = state_format);

/// A file that a manifest lists. Throws `std::runtime_error` with the path, as do the functions below, unless it has
/// the size and CRC-32 that are listed.
class ListedFile {
 public:
  ListedFile(const std::filesystem::path& path, const Manifest::File& listed);

  /// Reads bytes from `offset` on. Returns their CRC-32, continued from `crc`, the checksum of earlier bytes.
  /// Thread-safe.
  std::uint32_t read(std::uint64_t offset, std::span<std::byte> bytes, std::uint32_t crc = 0) const;
  /// Checks the CRC-32 of the whole file.
  void check(std::uint32_t crc) const;

 private:
  [[noreturn]] void fail(const std::string& requirement, const std::string& got) const;

  std::filesystem::path path_;
  Manifest::File listed_;
  InputFile file_;
};

/// Reads the file, and throws unless it has the size and CRC-32 that the manifest lists.
void check_file(const std::filesystem::path& path, const Manifest::File& listed);
/// Throws if the folder has files that the manifest does not list; check_files() also unless it has all, as listed.
void check_no_others(const std::filesystem::path& folder, const Manifest& manifest);
void check_files(const std::filesystem::path& folder, const Manifest& manifest);

/// Hugging Face's names for a model's weights: a single file, or an index that lists several.
inline constexpr const char* weights_name = "model.safetensors";
inline constexpr const char* weights_index_name = "model.safetensors.index.json";

/// Maps each tensor's name to its file.
using WeightMap = std::map<std::string, std::string>;

/// Reads an untrusted index. Throws `std::runtime_error`; messages begin with `what`, for example a path.
WeightMap read_weights_index(std::string_view text, const std::string& what);

/// Returns the text of an index, like Python's `json.dumps` with sorted keys and an indent of 2.
std::string text_of_index(const WeightMap& files, std::uint64_t total_parameters, std::uint64_t total_size);

/// Returns the keys of a map.
std::vector<std::string> keys_of(const auto& map) {
  std::vector<std::string> keys;
  for (auto& [key, value] : map) keys.push_back(key);
  return keys;
}

/// Returns a name quoted as in JSON, shortened to fit one line of a message.
std::string in_quotes(std::string_view name);

/// The safetensors format: the header's size in 8 bytes, little-endian; a JSON header; the tensors without gaps.

struct SafetensorsEntry {
  std::string dtype = {};
  std::vector<std::int64_t> shape = {};
  std::uint64_t begin = 0, end = 0;  // byte offsets from the end of the header
};
using NamedSafetensorsEntry = std::pair<std::string, SafetensorsEntry>;

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors = {};
  std::map<std::string, std::string> metadata = {};
  std::uint64_t data_begin = 0;  // byte offset in the file
};

/// The dtypes in the order in which tensors are written: largest alignment first, so that all tensors are aligned.
inline constexpr std::array<std::pair<std::string_view, unsigned>, 22> safetensors_dtype_bits{
    {{"U64", 64},        {"I64", 64},    {"F64", 64},    {"C64", 64},    {"F32", 32}, {"U32", 32},
     {"I32", 32},        {"BF16", 16},   {"F16", 16},    {"U16", 16},    {"I16", 16}, {"F8_E5M2FNUZ", 8},
     {"F8_E4M3FNUZ", 8}, {"F8_E8M0", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"I8", 8},   {"U8", 8},
     {"F6_E3M2", 6},     {"F6_E2M3", 6}, {"F4", 4},      {"BOOL", 8}}};

/// Returns the index of a dtype in `safetensors_dtype_bits`; the table's size if it is unknown.
std::size_t safetensors_dtype_rank(std::string_view dtype);

/// Reads the size of the header from the first 8 bytes of an untrusted file of `file_size` bytes. Throws
/// `std::runtime_error`, as do the functions below; messages begin with `what`, for example a path.
std::uint64_t safetensors_header_size(std::string_view first, std::uint64_t file_size, const std::string& what);

/// Parses the untrusted header `text` of a file that has `data_size` bytes of data.
SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_size, const std::string& what);

/// Reads the header of an untrusted file.
SafetensorsHeader read_safetensors_header(std::string_view file, const std::string& what);

/// Sorts the tensors, whose sizes are `end - begin`, and assigns their offsets. Returns the file up to its data, with
/// the same bytes as Python's safetensors. Throws the errors that reading the header would throw.
std::string lay_out_safetensors(std::vector<NamedSafetensorsEntry>& tensors,
                                const std::map<std::string, std::string>& metadata, const std::string& what);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/formats.ipp>
#endif
