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

/// A file that a manifest lists, read once from its beginning to its end, with its checksum as it goes by. Throws
/// `std::runtime_error` with its path, as the next two do.
class ListedFile {
 public:
  /// `for_each(count, body)` calls body(i) for each, as it likes.
  using ForEach = std::function<void(std::size_t count, const std::function<void(std::size_t)>& body)>;

  ListedFile(const std::filesystem::path& path, const Manifest::File& listed);

  std::uint64_t left() const { return left_; }

  /// As many bytes, which must be left.
  void read(void* data, std::uint64_t size);
  /// All that is left, into these pieces in their order.
  void read(std::span<const std::span<std::byte>> pieces, const ForEach& for_each);

  /// After the last byte.
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

/// The file is as it was written, byte for byte.
void check_file(const std::filesystem::path& path, const Manifest::File& listed);

/// The folder has no files that the manifest does not list.
void check_no_others(const std::filesystem::path& folder, const Manifest& manifest);

/// The folder has the files that the manifest lists, byte for byte, and no others.
void check_files(const std::filesystem::path& folder, const Manifest& manifest);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/listed_files.ipp>
#endif
