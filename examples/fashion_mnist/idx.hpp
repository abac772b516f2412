// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gzip_reader.hpp"

namespace fashion_mnist {

/// The two IDX files of the MNIST family. A value is its file's magic number: 0, 0, the element type (8: bytes),
/// the number of dimensions. Big-endian 32-bit sizes, one a dimension, follow it, then the elements.
enum class IdxKind : std::uint32_t { labels = 0x00000801, images = 0x00000803 };

inline constexpr std::int64_t image_side = 28;
inline constexpr std::int64_t class_count = 10;
inline constexpr std::int64_t max_idx_items = 1'000'000;  // limits the memory for a hostile file to 784 MB

struct IdxFile {
  std::int64_t count = 0;           // images or labels
  std::vector<std::uint8_t> bytes;  // count x 28 x 28 pixels, or count labels below 10
};

namespace detail {

inline std::uint32_t big_endian(const std::vector<std::uint8_t>& bytes, std::size_t offset) {
  return std::uint32_t{bytes[offset]} << 24 | std::uint32_t{bytes[offset + 1]} << 16 |
         std::uint32_t{bytes[offset + 2]} << 8 | std::uint32_t{bytes[offset + 3]};
}

inline std::string describe_magic(std::uint32_t magic) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", static_cast<unsigned>(magic));
  if (magic == static_cast<std::uint32_t>(IdxKind::labels)) return std::string(text) + " (a label file)";
  if (magic == static_cast<std::uint32_t>(IdxKind::images)) return std::string(text) + " (an image file)";
  return text;
}

/// Checks the header and returns its count.
inline std::int64_t parse_idx_header(const std::filesystem::path& path, IdxKind kind,
                                     const std::vector<std::uint8_t>& header, std::size_t header_size) {
  const auto expected = static_cast<std::uint32_t>(kind);
  if (header.size() >= 4 && big_endian(header, 0) != expected)
    fail(path, "magic number must be ", describe_magic(expected), ", got ", describe_magic(big_endian(header, 0)));
  if (header.size() < header_size)
    fail(path, "must start with a header of ", header_size, " bytes, got ", header.size());

  const std::int64_t count = big_endian(header, 4);
  if (count < 1 || count > max_idx_items) fail(path, "count must be in [1, ", max_idx_items, "], got ", count);
  if (kind == IdxKind::images) {
    const std::int64_t rows = big_endian(header, 8), columns = big_endian(header, 12);
    if (rows != image_side || columns != image_side)
      fail(path, "images must be ", image_side, " x ", image_side, ", got ", rows, " x ", columns);
  }
  return count;
}

inline void check_labels(const std::filesystem::path& path, const std::vector<std::uint8_t>& labels) {
  const auto bad = std::find_if(labels.begin(), labels.end(), [](std::uint8_t label) { return label >= class_count; });
  if (bad != labels.end())
    fail(path, "labels must be below ", class_count, ", got ", int{*bad}, " at index ", bad - labels.begin());
}

}  // namespace detail

/// Reads an image or a label file, gzip-compressed or not.
///
/// @throws std::runtime_error naming the file, the requirement and the value, unless the file is exactly what its
/// header says: neither shorter nor longer, and undamaged.
inline IdxFile read_idx(const std::filesystem::path& path, IdxKind kind) {
  GzipReader reader(path);
  const std::size_t header_size = kind == IdxKind::images ? 16 : 8;
  const std::int64_t item_size = kind == IdxKind::images ? image_side * image_side : 1;

  IdxFile file;
  file.count = detail::parse_idx_header(path, kind, reader.read(header_size), header_size);
  const auto promised = static_cast<std::size_t>(file.count * item_size);
  file.bytes = reader.read(promised);
  if (file.bytes.size() != promised)
    fail(path, "must hold the ", promised, " bytes that its header promises, got ", file.bytes.size());
  reader.expect_end();
  if (kind == IdxKind::labels) detail::check_labels(path, file.bytes);
  return file;
}

}  // namespace fashion_mnist
