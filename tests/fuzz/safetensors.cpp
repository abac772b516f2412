// SPDX-License-Identifier: Apache-2.0
//
// Reads arbitrary bytes as a safetensors file, and as a header whose data has the size in the first 8 bytes.

#include <gradaccum/detail/io/formats.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using namespace gradaccum::detail;

namespace {

const std::string path = "a/file";

void require(bool condition) {
  if (!condition) std::abort();
}

/// Checks that the result can be written and read back equal.
void check(const SafetensorsHeader& header, std::uint64_t data_size) {
  std::vector<NamedSafetensorsEntry> entries(header.tensors.begin(), header.tensors.end());
  std::uint64_t bytes = 0;
  for (auto& [name, entry] : entries) {
    require(entry.begin <= entry.end && entry.end <= data_size);
    bytes += entry.end - entry.begin;
    std::uint64_t bits = safetensors_dtype_bits.at(safetensors_dtype_rank(entry.dtype)).second;
    for (auto size : entry.shape) require(size >= 0), bits *= static_cast<std::uint64_t>(size);
    require(bits == 8 * (entry.end - entry.begin));
  }
  require(bytes == data_size);
  const auto head = lay_out_safetensors(entries, header.metadata, path);
  require(head.size() % 8 == 0);
  const auto again = parse_safetensors_header(std::string_view(head).substr(8), data_size, path);
  require(again.metadata == header.metadata && again.tensors.size() == header.tensors.size());
  for (auto& [name, entry] : header.tensors)
    require(again.tensors.at(name).dtype == entry.dtype && again.tensors.at(name).shape == entry.shape);
}

template <class Read>
void attempt(const Read& read) {
  try {
    read();
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).starts_with(path + ": "));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  SafetensorsHeader header;
  std::uint64_t data_size = 0;
  bool is_read = false;
  attempt([&] {
    header = read_safetensors_header(bytes, path);
    data_size = size - header.data_begin;
    is_read = true;
  });
  if (!is_read && size > 8) {
    for (std::size_t i = 0; i < 8; ++i) data_size |= std::uint64_t{data[i]} << (8 * i);
    attempt([&] {
      header = parse_safetensors_header(bytes.substr(8), data_size, path);
      is_read = true;
    });
  }
  if (is_read) check(header, data_size);
  return 0;
}
