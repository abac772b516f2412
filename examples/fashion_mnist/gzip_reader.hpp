// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace fashion_mnist {

/// Throws an error with the file, the requirement and the value.
template <class... Parts>
[[noreturn]] void fail(const std::filesystem::path& path, const Parts&... parts) {
  std::ostringstream message;
  message << path.string() << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

/// Reads an untrusted file, gzip-compressed or not.
///
/// Inflates only the requested bytes, so that a few kilobytes that would expand to gigabytes are harmless.
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

  /// Returns the next `limit` bytes; fewer only at the end of the file.
  ///
  /// The buffer at most doubles with each successful read, so a header that promises more than the file has cannot
  /// cause a large allocation.
  std::vector<std::uint8_t> read(std::size_t limit) {
    std::vector<std::uint8_t> bytes;
    while (bytes.size() < limit) {
      const auto old_size = bytes.size();
      const auto wanted = std::min(limit - old_size, std::clamp(old_size, smallest_read, largest_read));
      bytes.resize(old_size + wanted);
      const auto got = read_some(bytes.data() + old_size, wanted);
      bytes.resize(old_size + got);
      if (got < wanted) break;
    }
    return bytes;
  }

  /// Throws unless the file ends here. Call it, because zlib compares checksums only at the end.
  void expect_end() {
    std::uint8_t byte;
    if (read_some(&byte, 1) != 0) fail(path_, "must end after the data that its header promises, but goes on");
  }

 private:
  static constexpr std::size_t smallest_read = 64 << 10;
  static constexpr std::size_t largest_read = 64 << 20;

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

}  // namespace fashion_mnist
