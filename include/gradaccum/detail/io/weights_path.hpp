// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace gradaccum::detail {

inline constexpr const char* weights_name = "model.safetensors";
inline constexpr const char* weights_index_name = "model.safetensors.index.json";

[[noreturn]] inline void refuse_pickle(const std::filesystem::path& path) {
  throw std::runtime_error(
      path.string() +
      ": must be in safetensors files; a pickle can run any program, and is not read. This line makes "
      "model.safetensors of it, in its folder:\n"
      "python3 -c \"import glob, torch, safetensors.torch; safetensors.torch.save_file("
      "{n: t.clone(memory_format=torch.contiguous_format) for f in glob.glob('pytorch_model*.bin') "
      "for n, t in torch.load(f, map_location='cpu', weights_only=True).items()}, "
      "'model.safetensors', {'format': 'pt'})\"");
}

/// The file or index that is meant by its path, or by that of its folder.
inline std::filesystem::path weights_path(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto is_there = [&](const char* name) {  // a link that leads nowhere as well, so that its name is reported
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

}  // namespace gradaccum::detail
