// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/detail/io/manifest_text.hpp>

#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// The file in which each tensor is, by the tensor's name.
using WeightMap = std::map<std::string, std::string>;

/// Reads Hugging Face's `model.safetensors.index.json`, and trusts nothing in it. `what`, a path say, begins the
/// messages.
class WeightsIndexReader {
 public:
  static constexpr std::size_t max_bytes = 100'000'000, max_tensors = 1'000'000, max_name = 4096, max_depth = 8;

  explicit WeightsIndexReader(const std::string& what) : what_(what) {}

  WeightMap read(std::string_view text) const {
    if (text.size() > max_bytes) fail("must have at most 100000000 bytes", std::to_string(text.size()));
    const auto json = parse_json(text, max_depth, what_);
    if (!json.is_object()) fail("must be an object", json.type_name());
    const auto map = json.find("weight_map");
    if (map == json.end() || !map->is_object())
      fail("must have an object \"weight_map\"", map == json.end() ? "none" : map->type_name());
    if (map->size() > max_tensors) fail("must have at most 1000000 tensors", std::to_string(map->size()));
    WeightMap files;
    for (const auto& [name, file] : map->items()) files.emplace_hint(files.end(), name, file_of(name, file));
    return files;
  }

 private:
  /// Leads neither out of the folder nor to a pickle.
  std::string file_of(const std::string& name, const nlohmann::json& json) const {
    if (name.size() > max_name) fail("a tensor's name must have at most 4096 bytes", std::to_string(name.size()));
    if (!json.is_string()) fail("the file of " + in_quotes(name) + " must be a text", json.type_name());
    const auto file = json.get<std::string>();
    if (!is_file_name(file) || !file.ends_with(".safetensors"))
      fail("the file of " + in_quotes(name) +
               " must have a plain name (A-Z a-z 0-9 _ . -, no dot in front) that ends " + "in .safetensors",
           in_quotes(file));
    return file;
  }

  [[noreturn]] void fail(const std::string& requirement, const std::string& got) const {
    throw std::runtime_error(what_ + ": " + requirement + ", got " + got);
  }

  const std::string& what_;
};

}  // namespace gradaccum::detail
