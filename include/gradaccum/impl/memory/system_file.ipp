// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/system_file.hpp>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <sstream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string text_of_system_file(const std::filesystem::path& path) {
  std::string text(std::size_t{1} << 16, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

/// Maps a path that leaves its mount (`/../other`), to a group that this process cannot see, to the mount itself.
GRADACCUM_INLINE std::filesystem::path visible(const std::filesystem::path& group) {
  return std::ranges::find(group, "..") == group.end() ? group.relative_path() : std::filesystem::path();
}

GRADACCUM_INLINE bool lists(const std::string& controllers, const std::string& wanted) {
  std::istringstream list(controllers);
  for (std::string controller; std::getline(list, controller, ',');)
    if (controller == wanted) return true;
  return false;
}

/// Parses lines `number:controllers:path`. Version 2 has no controllers, and all groups in one tree; version 1 has a
/// tree for each controller.
GRADACCUM_INLINE std::vector<std::filesystem::path> control_groups(const std::string& groups,
                                                                   const std::string& controller) {
  std::vector<std::filesystem::path> folders;
  std::istringstream lines(groups);
  for (std::string number, controllers, path;
       std::getline(lines, number, ':') && std::getline(lines, controllers, ':') && std::getline(lines, path);) {
    if (!controllers.empty() && !lists(controllers, controller)) continue;
    const std::filesystem::path tree = controllers.empty() ? "" : controller;
    for (auto group = visible(path); !group.empty(); group = group.parent_path()) folders.push_back(tree / group);
    folders.push_back(tree);
  }
  return folders;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
