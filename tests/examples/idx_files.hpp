// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

/// Writes IDX files, valid and invalid, for the tests of the FashionMNIST example.
namespace idx_files {

using Bytes = std::vector<std::uint8_t>;

/// Makes a header of a magic number and sizes, each 32 bits, big-endian.
inline Bytes header(const std::vector<std::uint32_t>& words) {
  Bytes bytes;
  for (const auto word : words)
    for (const int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<std::uint8_t>(word >> shift));
  return bytes;
}

inline Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

inline Bytes images(std::uint32_t count, const Bytes& pixels) { return header({0x803, count, 28, 28}) + pixels; }
inline Bytes labels(const Bytes& labels) { return header({0x801, static_cast<std::uint32_t>(labels.size())}) + labels; }

inline Bytes gzip(const Bytes& bytes) {
  z_stream stream{};
  if (deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY) != Z_OK) throw std::runtime_error("deflate");
  Bytes result(deflateBound(&stream, bytes.size()));
  stream.next_in = const_cast<Bytef*>(bytes.data());
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = result.data();
  stream.avail_out = static_cast<uInt>(result.size());
  if (deflate(&stream, Z_FINISH) != Z_STREAM_END) throw std::runtime_error("deflate");
  result.resize(stream.total_out);
  deflateEnd(&stream);
  return result;
}

inline std::filesystem::path write(const std::filesystem::path& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
  return path;
}

/// Writes `count` images of ten classes that are easy to distinguish: class k has a bright band from row 2k on.
inline void write_split(const std::filesystem::path& directory, const std::string& prefix, std::uint32_t count) {
  Bytes pixels, classes;
  std::uint32_t noise = count;  // a simple generator, to get the same files everywhere
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto label = static_cast<std::uint8_t>(i % 10);
    classes.push_back(label);
    for (int row = 0; row < 28; ++row)
      for (int column = 0; column < 28; ++column) {
        noise = noise * 1664525 + 1013904223;
        const bool bright = row >= 2 * label && row < 2 * label + 6;
        pixels.push_back(static_cast<std::uint8_t>((bright ? 160 : 0) + (noise >> 26)));
      }
  }
  write(directory / (prefix + "-images-idx3-ubyte.gz"), gzip(images(count, pixels)));
  write(directory / (prefix + "-labels-idx1-ubyte.gz"), gzip(labels(classes)));
}

}  // namespace idx_files
