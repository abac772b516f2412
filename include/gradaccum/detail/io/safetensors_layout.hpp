// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/safetensors_header.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

using NamedSafetensorsEntry = std::pair<std::string, SafetensorsEntry>;

/// The order in which tensors are written: by dtype, then by name.
inline bool is_written_before(const NamedSafetensorsEntry& a, const NamedSafetensorsEntry& b) {
  const auto rank_a = safetensors_dtype_rank(a.second.dtype), rank_b = safetensors_dtype_rank(b.second.dtype);
  return rank_a != rank_b ? rank_a < rank_b : a.first < b.first;
}

/// The header's JSON, with spaces after it so that the data begins at a multiple of 8.
inline std::string safetensors_json(const std::vector<NamedSafetensorsEntry>& tensors,
                                    const std::map<std::string, std::string>& metadata) {
  std::string text;
  const auto add = [&text](const std::string& name, const nlohmann::ordered_json& value) {
    text += (text.empty() ? "{" : ",") + nlohmann::json(name).dump() + ":" + value.dump();
  };
  if (!metadata.empty()) add("__metadata__", metadata);
  for (auto& [name, entry] : tensors)
    add(name, {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}});
  text += text.empty() ? "{}" : "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

/// Puts the tensors, whose bytes are counted from `begin` to `end`, in order and in their places. Returns the file up
/// to its data: for the same tensors the same bytes, those that Python's safetensors writes. Throws what reading it
/// would throw.
inline std::string lay_out_safetensors(std::vector<NamedSafetensorsEntry>& tensors,
                                       const std::map<std::string, std::string>& metadata, const std::string& what) {
  std::sort(tensors.begin(), tensors.end(), is_written_before);
  std::uint64_t end = 0;
  for (auto& [name, entry] : tensors) {
    const auto size = entry.end - entry.begin;
    entry.begin = std::exchange(end, end + size);
    entry.end = end;
  }
  std::string text;
  try {
    text = safetensors_json(tensors, metadata);
  } catch (const nlohmann::json::type_error&) {
    throw std::runtime_error(what + ": names and metadata must be UTF-8");
  }
  SafetensorsHeaderReader(what).read(text, end);
  std::string size(8, '\0');
  for (unsigned i = 0; i < 8; ++i) size[i] = static_cast<char>(text.size() >> (8 * i));
  return size + text;
}

}  // namespace gradaccum::detail
