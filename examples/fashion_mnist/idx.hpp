// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iomanip>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// Reads files in IDX format, the MNIST family's, which may be damaged or hostile.
namespace fashion_mnist {

/// Throws an error with the file, the requirement and the value.
template <class... Parts>
[[noreturn]] void fail(const std::filesystem::path& path, const Parts&... parts) {
  std::ostringstream message;
  message << path.string() << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

/// Reads a file, gzip-compressed or not. Inflates only the requested bytes, so that a few kilobytes that would expand
/// to gigabytes are harmless.
class GzipReader {
 public:
  explicit GzipReader(std::filesystem::path path) : path_(std::move(path)) {
    // Opening a directory would succeed and opening a pipe would wait for its writer.
    std::error_code error;
    const auto status = std::filesystem::status(path_, error);
    if (status.type() == std::filesystem::file_type::not_found) fail(path_, "must exist, but there is no such file");
    if (error) fail(path_, "must be readable, got '", error.message(), "'");
    if (status.type() != std::filesystem::file_type::regular) fail(path_, "must be a regular file, but is not");
    errno = 0;
    file_.reset(gzopen(path_.c_str(), "rb"));
    if (!file_) fail(path_, "must be readable, got '", std::strerror(errno), "'");
  }

  /// Returns the next `limit` bytes; fewer only at the end of the file. The buffer at most doubles with each successful
  /// read, so a header that promises more than the file has cannot cause a large allocation.
  std::vector<std::uint8_t> read(std::size_t limit) {
    std::vector<std::uint8_t> bytes;
    for (std::size_t got = 1; got > 0 && bytes.size() < limit;) {
      const auto before = bytes.size();
      bytes.resize(std::min(limit, std::max(2 * before, std::size_t{64} << 10)));
      got = read_some(bytes.data() + before, bytes.size() - before);
      bytes.resize(before + got);
    }
    return bytes;
  }

  /// Throws unless the file ends here. Call it, because zlib compares checksums only at the end.
  void expect_end() {
    std::uint8_t byte;
    if (read_some(&byte, 1) != 0) fail(path_, "must end after the data that its header promises, but goes on");
  }

 private:
  struct Close {
    void operator()(gzFile file) const { gzclose_r(file); }
  };

  std::size_t read_some(std::uint8_t* target, std::size_t size) {
    const int got = gzread(file_.get(), target, static_cast<unsigned>(size));
    int error = Z_OK;
    const char* message = gzerror(file_.get(), &error);
    // gzread reports no error for a truncated file, only the bytes before the cut.
    if (got < 0 || error != Z_OK) fail(path_, "must be intact, but reading it gave '", message, "'");
    return static_cast<std::size_t>(got);
  }

  std::filesystem::path path_;
  std::unique_ptr<gzFile_s, Close> file_;
};

/// The two kinds of files. A value is its file's magic number: 0, 0, the element type (8: bytes), the number of
/// dimensions. Big-endian 32-bit sizes, one per dimension, follow it, then the elements.
enum class IdxKind : std::uint32_t { labels = 0x00000801, images = 0x00000803 };

inline constexpr std::int64_t image_side = 28;
inline constexpr std::int64_t class_count = 10;
inline constexpr std::int64_t max_idx_items = 1'000'000;  // limits a hostile file to 784 MB of bytes

struct IdxFile {
  std::int64_t count = 0;           // images or labels
  std::vector<std::uint8_t> bytes;  // count x 28 x 28 pixels, or count labels below 10
};

/// Reads an image or a label file, gzip-compressed or not.
///
/// @throws std::runtime_error naming the file, the requirement and the value, unless the file is exactly what its
/// header says: neither shorter nor longer, and undamaged.
inline IdxFile read_idx(const std::filesystem::path& path, IdxKind kind) {
  GzipReader reader(path);
  const bool images = kind == IdxKind::images;
  const std::size_t header_size = images ? 16 : 8;
  const auto header = reader.read(header_size);
  const auto number = [&](std::size_t at) {
    return std::uint32_t{header[at]} << 24 | std::uint32_t{header[at + 1]} << 16 | std::uint32_t{header[at + 2]} << 8 |
           std::uint32_t{header[at + 3]};
  };
  if (header.size() >= 4 && number(0) != static_cast<std::uint32_t>(kind))
    fail(path, "magic number must be ", images ? "0x00000803 (images)" : "0x00000801 (labels)", ", got 0x", std::hex,
         std::setw(8), std::setfill('0'), number(0));
  if (header.size() < header_size)
    fail(path, "must start with a header of ", header_size, " bytes, got ", header.size());
  IdxFile file{.count = number(4), .bytes = {}};
  if (file.count < 1 || file.count > max_idx_items)
    fail(path, "count must be in [1, ", max_idx_items, "], got ", file.count);
  if (images && (number(8) != image_side || number(12) != image_side))
    fail(path, "images must be ", image_side, " x ", image_side, ", got ", number(8), " x ", number(12));

  const auto promised = static_cast<std::size_t>(file.count * (images ? image_side * image_side : 1));
  file.bytes = reader.read(promised);
  if (file.bytes.size() != promised)
    fail(path, "must hold the ", promised, " bytes that its header promises, got ", file.bytes.size());
  reader.expect_end();
  const auto bad = std::ranges::find_if(file.bytes, [&](std::uint8_t byte) { return !images && byte >= class_count; });
  if (bad != file.bytes.end())
    fail(path, "labels must be below ", class_count, ", got ", int{*bad}, " at index ", bad - file.bytes.begin());
  return file;
}

}  // namespace fashion_mnist
