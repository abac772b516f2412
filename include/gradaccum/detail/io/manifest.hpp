// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/files.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
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

/// Reads a file that a manifest lists, once and sequentially, and computes its checksum. Throws `std::runtime_error`
/// with the path, as do the functions below.
class ListedFile {
 public:
  /// `for_each(count, body)` calls body(i) for each i in [0, count), in any order or in parallel.
  using ForEach = std::function<void(std::size_t count, const std::function<void(std::size_t)>& body)>;

  ListedFile(const std::filesystem::path& path, const Manifest::File& listed);

  std::uint64_t left() const { return left_; }

  /// Reads `size` bytes, at most left().
  void read(void* data, std::uint64_t size);
  /// Reads the rest of the file into consecutive pieces.
  void read(std::span<const std::span<std::byte>> pieces, const ForEach& for_each);

  /// Checks the CRC-32; call it after the last byte has been read.
  void check() const;

 private:
  [[noreturn]] void fail(const std::string& requirement, const std::string& got) const;
  std::uint32_t read_piece(std::uint64_t place, std::span<std::byte> piece) const;

  std::filesystem::path path_;
  Manifest::File listed_;
  InputFile file_;
  std::uint64_t left_;
  std::uint32_t crc_ = 0;
};

/// Throws unless the file has the size and CRC-32 that the manifest lists.
void check_file(const std::filesystem::path& path, const Manifest::File& listed);

/// Throws if the folder has files that the manifest does not list.
void check_no_others(const std::filesystem::path& folder, const Manifest& manifest);

/// Throws unless the folder has exactly the files that the manifest lists, with their sizes and CRC-32s.
void check_files(const std::filesystem::path& folder, const Manifest& manifest);

/// The name of a state: `step-000040`, or `step-000040.1`, `.2` and so on if that is taken. Ordered by time.
struct StateName {
  std::int64_t step = 0, repeat = 0;

  auto operator<=>(const StateName&) const = default;

  std::string text() const;

  /// Parses a name; nullopt unless `text()` gives exactly `text`, so that no two names mean the same state.
  static std::optional<StateName> of(std::string_view text);
};

/// Returns true if both states were saved after the same number of updates.
bool of_one_step(const std::filesystem::path& one, const std::filesystem::path& other);

/// A directory of states. Each is a folder that appears atomically and never changes, even if the process is killed or
/// the power fails: all that `finished` lists is complete. One writer at a time. Other names are never touched.
///
/// Throws `std::runtime_error` with a path.
class StateDirectory {
 public:
  struct State : StateName {
    std::filesystem::path path;
  };

  explicit StateDirectory(std::filesystem::path path) : path_(std::move(path)) {}

  /// The complete states, oldest first.
  std::vector<State> finished() const;

  /// Adds a state and returns its path. `write(folder)` creates the files and syncs them.
  std::filesystem::path add(std::int64_t step, const std::function<void(const std::filesystem::path&)>& write);

  /// Replaces `older` by `newer`, a state of the same step, under the older one's name. Returns that path.
  std::filesystem::path replace(const std::filesystem::path& older, const std::filesystem::path& newer);

  /// Removes all states except the `count` newest and `others`.
  void keep_last(std::int64_t count, const std::vector<std::filesystem::path>& others = {});

  /// Removes folders that a killed process left half written or half removed. The other writing methods do so too.
  void sweep() const;

 private:
  std::vector<std::filesystem::path> leftovers() const;
  void remove_leftovers() const;
  std::filesystem::path name_for(std::int64_t step) const;

  std::filesystem::path path_;
};

/// Hugging Face's names for a model's weights: a single file, or an index that lists several.
inline constexpr const char* weights_name = "model.safetensors";
inline constexpr const char* weights_index_name = "model.safetensors.index.json";

/// Returns the file or index that `path`, itself or as its folder, refers to.
std::filesystem::path weights_path(const std::filesystem::path& path);

/// The file that holds each tensor, by the tensor's name.
using WeightMap = std::map<std::string, std::string>;

/// Reads an untrusted index. Throws `std::runtime_error`; messages begin with `what`, for example a path.
WeightMap read_weights_index(std::string_view text, const std::string& what);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/manifest.ipp>
#endif
