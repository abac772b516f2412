// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A safetensors file: the size of its header in 8 bytes, little-endian; the header, JSON; the tensors' bytes, which
/// follow each other without gaps.

struct SafetensorsEntry {
  std::string dtype = {};
  std::vector<std::int64_t> shape = {};
  std::uint64_t begin = 0, end = 0;  // bytes, counted from the end of the header
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors = {};
  std::map<std::string, std::string> metadata = {};
  std::uint64_t data_begin = 0;  // counted from the beginning of the file
};

/// In the order in which their tensors are written: the most strictly aligned first, so that all are aligned.
inline constexpr std::array<std::pair<std::string_view, unsigned>, 22> safetensors_dtype_bits{
    {{"U64", 64},        {"I64", 64},    {"F64", 64},    {"C64", 64},    {"F32", 32}, {"U32", 32},
     {"I32", 32},        {"BF16", 16},   {"F16", 16},    {"U16", 16},    {"I16", 16}, {"F8_E5M2FNUZ", 8},
     {"F8_E4M3FNUZ", 8}, {"F8_E8M0", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"I8", 8},   {"U8", 8},
     {"F6_E3M2", 6},     {"F6_E2M3", 6}, {"F4", 4},      {"BOOL", 8}}};

/// The place in that order; the number of dtypes for one that is none.
inline std::size_t safetensors_dtype_rank(std::string_view dtype) {
  const auto& all = safetensors_dtype_bits;
  return static_cast<std::size_t>(
      std::find_if(all.begin(), all.end(), [dtype](auto& known) { return known.first == dtype; }) - all.begin());
}

/// Reads a header, and trusts nothing in it. `what`, a path say, begins the messages.
class SafetensorsHeaderReader {
 public:
  static constexpr std::size_t max_header = 100'000'000;  // bytes, as in the reference implementation
  static constexpr std::size_t max_tensors = 1'000'000, max_name = 4096, max_dimensions = 64;

  explicit SafetensorsHeaderReader(const std::string& what) : what_(what) {}

  SafetensorsHeader read_file(std::string_view file) const {
    const auto size = size_of_header(file.substr(0, 8), file.size());
    auto header = read(file.substr(8, size), file.size() - 8 - size);
    header.data_begin = 8 + size;
    return header;
  }

  /// By the first 8 bytes of a file of that size.
  std::uint64_t size_of_header(std::string_view first, std::uint64_t file_size) const {
    require(first.size() == 8 && file_size >= 8, "must have at least 8 bytes, got ", file_size);
    std::uint64_t size = 0;
    for (unsigned i = 0; i < 8; ++i) size |= std::uint64_t{static_cast<unsigned char>(first[i])} << (8 * i);
    require(size <= max_header, "its header must have at most 100000000 bytes, got ", size);
    require(size <= file_size - 8, "its header must end with the file or before, got ", size, " bytes of ",
            file_size - 8);
    return size;
  }

  /// The header alone, of a file with as many bytes of data.
  SafetensorsHeader read(std::string_view text, std::uint64_t data_size) const {
    require(text.size() <= max_header, "its header must have at most 100000000 bytes, got ", text.size());
    require(text.starts_with('{'), "its header must begin with {");
    const auto json = parse_json(text, 3, what_);
    require(json.size() <= max_tensors, "must have at most 1000000 tensors, got ", json.size());
    SafetensorsHeader header;
    for (auto& [name, value] : json.items())
      if (name == "__metadata__")
        header.metadata = metadata_of(value);
      else
        header.tensors.emplace_hint(header.tensors.end(), name, entry_of(name, value));
    check_offsets(header.tensors, data_size);
    return header;
  }

 private:
  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) throw std::runtime_error((what_ + ": " + ... + text_of(parts)));
  }
  static std::string text_of(std::string_view text) { return std::string(text); }
  static std::string text_of(std::uint64_t number) { return std::to_string(number); }

  std::map<std::string, std::string> metadata_of(const nlohmann::json& value) const {
    require(value.is_object(), "__metadata__ must be an object");
    std::map<std::string, std::string> metadata;
    for (auto& [key, text] : value.items()) {
      require(text.is_string(), "__metadata__ must have texts only, got another value for ", in_quotes(key));
      metadata.emplace_hint(metadata.end(), key, text.get_ref<const std::string&>());
    }
    return metadata;
  }

  SafetensorsEntry entry_of(const std::string& name, const nlohmann::json& value) const {
    const auto shown = "the tensor " + in_quotes(name);
    require(name.size() <= max_name, shown, " must have a name of at most 4096 bytes, got ", name.size());
    require(value.is_object() && value.size() == 3 && value.contains("dtype") && value.contains("shape") &&
                value.contains("data_offsets"),
            shown, " must have dtype, shape and data_offsets, and nothing else");
    const auto& dtype = value["dtype"];
    require(dtype.is_string() && safetensors_dtype_rank(dtype.get_ref<const std::string&>()) < dtypes(), shown,
            " must have a dtype of safetensors, got ", dtype.dump(-1, ' ', true).substr(0, 60));
    SafetensorsEntry entry{.dtype = dtype.get<std::string>()};
    const auto sizes = numbers_of(value["shape"], shown + ": shape");
    require(sizes.size() <= max_dimensions, shown, " must have at most 64 dimensions, got ", sizes.size());
    entry.shape.assign(sizes.begin(), sizes.end());
    const auto offsets = numbers_of(value["data_offsets"], shown + ": data_offsets");
    require(offsets.size() == 2 && offsets[0] <= offsets[1], shown, " must have a begin and an end that is not before");
    entry.begin = offsets[0];
    entry.end = offsets[1];
    check_size(entry, shown);
    return entry;
  }

  static constexpr std::size_t dtypes() { return safetensors_dtype_bits.size(); }

  std::vector<std::uint64_t> numbers_of(const nlohmann::json& value, const std::string& shown) const {
    require(value.is_array(), shown, " must be an array");
    std::vector<std::uint64_t> numbers;
    for (auto& element : value) {
      require(element.is_number_unsigned() && element.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max(),
              shown, " must have whole numbers from 0 to 2^63 - 1 only");
      numbers.push_back(element.get<std::uint64_t>());
    }
    return numbers;
  }

  void check_size(const SafetensorsEntry& entry, const std::string& shown) const {
    std::int64_t bits = safetensors_dtype_bits[safetensors_dtype_rank(entry.dtype)].second;
    bool is_empty = false;
    for (auto size : entry.shape) {
      is_empty = is_empty || size == 0;  // and still its strides are products of the other sizes
      require(!__builtin_mul_overflow(bits, std::max<std::int64_t>(size, 1), &bits), shown,
              " must have fewer than 2^63 bits");
    }
    if (is_empty) bits = 0;
    require(bits % 8 == 0, shown, " must end at a whole byte");
    const auto bytes = static_cast<std::uint64_t>(bits / 8);
    require(bytes == entry.end - entry.begin, shown, " must have the bytes of its shape and dtype, ", bytes, ", got ",
            entry.end - entry.begin);
  }

  void check_offsets(const std::map<std::string, SafetensorsEntry>& tensors, std::uint64_t data_size) const {
    using Named = const std::pair<const std::string, SafetensorsEntry>;
    std::vector<Named*> order;
    for (auto& named : tensors) order.push_back(&named);
    std::sort(order.begin(), order.end(), [](Named* a, Named* b) {
      return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
    });
    std::uint64_t end = 0;
    for (auto* named : order) {
      require(named->second.begin == end, "the tensor ", in_quotes(named->first),
              " must begin where the one before ends, at ", end, ", got ", named->second.begin);
      end = named->second.end;
    }
    require(end == data_size, "its tensors must be all of its data, ", data_size, " bytes, got ", end);
  }

  const std::string& what_;
};

}  // namespace gradaccum::detail
