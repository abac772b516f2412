// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/weight_files.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/detail/io/weights_index.hpp>

#include <c10/util/Exception.h>

#include <stdexcept>
#include <system_error>

namespace gradaccum::io {

GRADACCUM_INLINE WeightFiles::WeightFiles(const std::filesystem::path& path) : path_(detail::weights_path(path)) {
  if (path_.string().ends_with(".index.json")) {
    open_listed();
  } else {
    const auto file = std::make_shared<const SafetensorsFile>(path_);
    for (auto& name : file->keys()) files_.emplace(name, file);
  }
}

GRADACCUM_INLINE void WeightFiles::open_listed() {
  const auto fail = [this](const auto&... parts) {
    throw std::runtime_error(c10::str(path_.string(), ": ", parts...));
  };
  const auto index = detail::read_weights_index(detail::MappedFile(path_).text(), path_.string());
  std::map<std::string, File> listed;
  for (auto& [name, file] : index) listed[file];
  for (auto& [file, opened] : listed) {
    const auto path = path_.parent_path() / file;
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) fail("lists ", file, ", which must be in its folder, and is not");
    opened = std::make_shared<const SafetensorsFile>(path);
    for (auto& name : opened->keys())
      if (const auto [other, is_new] = files_.emplace(name, opened); !is_new)
        fail("the tensor ", detail::in_quotes(name), " must be in one file, got it in ",
             other->second->path().filename().string(), " and in ", file);
  }
  for (auto& [name, file] : index)
    if (const auto found = files_.find(name); found == files_.end() || found->second != listed.at(file))
      fail("lists the tensor ", detail::in_quotes(name), " in ", file, ", which must have it, and has not");
  for (auto& [name, file] : files_)
    if (!index.contains(name)) unlisted_.push_back(name);
  for (auto& name : unlisted_) files_.erase(name);
}

GRADACCUM_INLINE std::vector<std::string> WeightFiles::keys() const {
  std::vector<std::string> names;
  for (auto& [name, file] : files_) names.push_back(name);
  return names;
}

GRADACCUM_INLINE const SafetensorsFile& WeightFiles::file_of(const std::string& name) const {
  const auto found = files_.find(name);
  TORCH_CHECK(found != files_.end(), path_.string(), ": must have a tensor ", detail::in_quotes(name),
              ", but has none");
  return *found->second;
}

GRADACCUM_INLINE at::Tensor WeightFiles::get_tensor(const std::string& name) const {
  return file_of(name).get_tensor(name);
}

GRADACCUM_INLINE void WeightFiles::release(const std::string& name) const { file_of(name).release(name); }

}  // namespace gradaccum::io
