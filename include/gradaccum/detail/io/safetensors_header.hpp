// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradaccum::detail {

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

/// The index of a dtype in `safetensors_dtype_bits`; the table's size if it is unknown.
std::size_t safetensors_dtype_rank(std::string_view dtype);

/// Reads an untrusted header. Throws `std::runtime_error`; messages begin with `what`, for example a path.
class SafetensorsHeaderReader {
 public:
  explicit SafetensorsHeaderReader(const std::string& what) : what_(what) {}

  SafetensorsHeader read_file(std::string_view file) const;

  /// Reads the header's size from the first 8 bytes of a file of `file_size` bytes.
  std::uint64_t size_of_header(std::string_view first, std::uint64_t file_size) const;
  /// Parses the header `text` of a file that has `data_size` bytes of data.
  SafetensorsHeader read(std::string_view text, std::uint64_t data_size) const;

 private:
  const std::string& what_;
};

/// Sorts the tensors, whose sizes are `end - begin`, and assigns their offsets. Returns the file up to its data, byte
/// for byte what Python's safetensors writes. Throws what reading the header would throw.
std::string lay_out_safetensors(std::vector<NamedSafetensorsEntry>& tensors,
                                const std::map<std::string, std::string>& metadata, const std::string& what);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/safetensors_header.ipp>
#endif
