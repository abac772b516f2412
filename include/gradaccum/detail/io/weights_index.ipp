// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/weights_index.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/detail/io/manifest.hpp>

#include <cstddef>
#include <stdexcept>
#include <system_error>

namespace gradaccum::detail {

[[noreturn]] GRADACCUM_INLINE void refuse_pickle(const std::filesystem::path& path) {
  throw std::runtime_error(
      path.string() +
      ": must be in safetensors files; a pickle can run any program, and is not read. This line makes "
      "model.safetensors of it, in its folder:\n"
      "python3 -c \"import glob, torch, safetensors.torch; safetensors.torch.save_file("
      "{n: t.clone(memory_format=torch.contiguous_format) for f in glob.glob('pytorch_model*.bin') "
      "for n, t in torch.load(f, map_location='cpu', weights_only=True).items()}, "
      "'model.safetensors', {'format': 'pt'})\"");
}

GRADACCUM_INLINE std::filesystem::path weights_path(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto is_there = [&](const char* name) {  // true also for a dangling link, so that errors name it
    return std::filesystem::exists(std::filesystem::symlink_status(path / name, ignored));
  };
  constexpr const char* pickles[] = {"pytorch_model.bin", "pytorch_model.bin.index.json"};
  if (!std::filesystem::is_directory(path, ignored)) {
    for (auto* name : pickles)
      if (path.filename() == name) refuse_pickle(path);
    return path;
  }
  for (auto* name : {weights_name, weights_index_name})
    if (is_there(name)) return path / name;
  for (auto* name : pickles)
    if (is_there(name)) refuse_pickle(path / name);
  throw std::runtime_error(path.string() + ": must have " + weights_name + " or " + weights_index_name +
                           ", got a folder without them; a file of another name is read by its own path");
}

[[noreturn]] GRADACCUM_INLINE void index_error(const std::string& what, const std::string& requirement,
                                               const std::string& got) {
  throw std::runtime_error(what + ": " + requirement + ", got " + got);
}

GRADACCUM_INLINE WeightMap read_weights_index(std::string_view text, const std::string& what) {
  constexpr std::size_t max_bytes = 100'000'000, max_tensors = 1'000'000, max_name = 4096, max_depth = 8;
  if (text.size() > max_bytes) index_error(what, "must have at most 100000000 bytes", std::to_string(text.size()));
  const auto json = parse_json(text, max_depth, what);
  const auto* const index = json.as<Json::Object>();
  if (!index) index_error(what, "must be an object", json.kind());
  const auto found = index->find("weight_map");
  const auto* const map = found == index->end() ? nullptr : found->second.as<Json::Object>();
  if (!map)
    index_error(what, "must have an object \"weight_map\"", found == index->end() ? "none" : found->second.kind());
  if (map->size() > max_tensors) index_error(what, "must have at most 1000000 tensors", std::to_string(map->size()));
  WeightMap files;
  for (const auto& [name, value] : *map) {
    if (name.size() > max_name)
      index_error(what, "a tensor's name must have at most 4096 bytes", std::to_string(name.size()));
    const auto* const file = value.as<std::string>();
    if (!file) index_error(what, "the file of " + in_quotes(name) + " must be a text", value.kind());
    // The name must not leave the folder or refer to a pickle.
    if (!is_file_name(*file) || !file->ends_with(".safetensors"))
      index_error(what,
                  "the file of " + in_quotes(name) +
                      " must have a plain name (A-Z a-z 0-9 _ . -, no dot in front) that ends in .safetensors",
                  in_quotes(*file));
    files.emplace_hint(files.end(), name, *file);
  }
  return files;
}

}  // namespace gradaccum::detail
