// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum::detail {

/// A JSON value. A whole number is a `std::uint64_t`, or a `std::int64_t` if negative; any other number is a `double`.
struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string, Array, Object> value = nullptr;

  /// Returns nullptr if the value is of another kind.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&value);
  }
  /// Returns `null`, `boolean`, `number`, `string`, `array` or `object`.
  const char* kind() const;
  /// The value as one line of ASCII JSON, which can be truncated anywhere.
  std::string text() const;
};

/// Parses exactly one JSON value with unique names and at most `max_depth` levels of nesting. Throws
/// `std::runtime_error`; messages begin with `what`, for example a path.
Json parse_json(std::string_view text, std::size_t max_depth, const std::string& what);

/// A string as JSON; nullopt if it is not UTF-8.
std::optional<std::string> json_of(const std::string& text);

/// A number as JSON, which parses to the same number.
std::string json_of(double number);

/// A name quoted as in JSON, shortened to fit one line of a message.
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
#include <gradaccum/impl/io/safetensors_header.ipp>
#endif
