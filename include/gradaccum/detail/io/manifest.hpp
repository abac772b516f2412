// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/directory.hpp>
#include <gradaccum/detail/io/input_file.hpp>
#include <gradaccum/detail/io/manifest_reader.hpp>
#include <gradaccum/detail/io/manifest_text.hpp>
#include <gradaccum/detail/io/output_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Synced, as a new file. Throws `std::runtime_error` as the next two do: with the file's path.
inline void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  const auto text = text_of(manifest);
  OutputFile file(folder / manifest_name);
  file.write(text.data(), text.size());
  file.close();
}

inline Manifest read_manifest(const std::filesystem::path& folder) {
  const auto path = folder / manifest_name;
  InputFile file(path);
  if (file.bytes() > Manifest::max_bytes)
    throw std::runtime_error(path.string() + ": must have at most 64 MiB, got " + std::to_string(file.bytes()) +
                             " bytes");
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  text.resize(file.read(text.data(), text.size()));
  return manifest_of(text, path.string());
}

/// A file that a manifest lists, read once from its beginning to its end, with its checksum as it goes by.
class ListedFile {
 public:
  static constexpr std::size_t chunk = 1 << 20;

  ListedFile(const std::filesystem::path& path, const Manifest::File& listed)
      : path_(path), listed_(listed), file_(path), left_(listed.bytes) {
    if (file_.bytes() != listed.bytes) fail(std::to_string(listed.bytes) + " bytes", std::to_string(file_.bytes()));
  }

  std::uint64_t left() const { return left_; }

  /// As many bytes, which must be left.
  void read(void* data, std::uint64_t size) {
    for (auto* bytes = static_cast<char*>(data); size > 0;) {
      const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(size, chunk));
      if (file_.read(bytes, wanted) != wanted) fail(std::to_string(listed_.bytes) + " bytes", "fewer");
      crc_ = crc32(bytes, wanted, crc_);  // now, while they are in the cache
      bytes += wanted;
      size -= wanted;
      left_ -= wanted;
    }
  }

  /// All that is left, into these pieces in their order: `for_each(count, body)` calls body(i) for each, as it likes.
  template <class ForEach>
  void read(std::span<const std::span<std::byte>> pieces, const ForEach& for_each) {
    std::vector<std::uint64_t> places{listed_.bytes - left_};
    for (auto piece : pieces) places.push_back(places.back() + piece.size());
    if (places.back() != listed_.bytes) fail(std::to_string(listed_.bytes) + " bytes", std::to_string(places.back()));
    std::vector<std::uint32_t> crcs(pieces.size());
    for_each(pieces.size(), [&](std::size_t i) { crcs[i] = read_piece(places[i], pieces[i]); });
    for (std::size_t i = 0; i < pieces.size(); ++i) crc_ = crc32_of_both(crc_, crcs[i], pieces[i].size());
    left_ = 0;
  }

  /// After the last byte.
  void check() const {
    if (crc_ != listed_.crc32) fail("the CRC-32 " + crc32_text(listed_.crc32), crc32_text(crc_));
  }

 private:
  [[noreturn]] void fail(const std::string& requirement, const std::string& got) const {
    throw std::runtime_error(path_.string() + ": must have " + requirement + ", as the manifest says, got " + got);
  }

  std::uint32_t read_piece(std::uint64_t place, std::span<std::byte> piece) const {
    std::uint32_t crc = 0;
    while (!piece.empty()) {
      const auto now = piece.first(std::min(piece.size(), chunk));
      if (file_.read_at(place, now.data(), now.size()) != now.size())
        fail(std::to_string(listed_.bytes) + " bytes", "fewer");
      crc = crc32(now.data(), now.size(), crc);
      place += now.size();
      piece = piece.subspan(now.size());
    }
    return crc;
  }

  std::filesystem::path path_;
  Manifest::File listed_;
  InputFile file_;
  std::uint64_t left_;
  std::uint32_t crc_ = 0;
};

inline void check_file(const std::filesystem::path& path, const Manifest::File& listed) {
  ListedFile file(path, listed);
  std::vector<char> chunk(ListedFile::chunk);
  while (file.left() > 0) file.read(chunk.data(), std::min<std::uint64_t>(file.left(), chunk.size()));
  file.check();
}

inline void check_no_others(const std::filesystem::path& folder, const Manifest& manifest) {
  for (const auto& name : names_in(folder))
    if (name != manifest_name && manifest.files.count(name) == 0)
      throw std::runtime_error((folder / name).string() + ": must be listed in " + manifest_name + ", or not be there");
}

/// The folder has the files that the manifest lists, byte for byte, and no others.
inline void check_files(const std::filesystem::path& folder, const Manifest& manifest) {
  check_no_others(folder, manifest);
  for (const auto& [name, file] : manifest.files) check_file(folder / name, file);
}

}  // namespace gradaccum::detail
