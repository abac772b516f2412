// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/manifest.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace gradaccum::detail {

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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/listed_files.ipp>
#endif
