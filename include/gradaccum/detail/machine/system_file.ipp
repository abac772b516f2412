// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/system_file.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <fstream>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string text_of_system_file(const std::filesystem::path& path) {
  std::string text(std::size_t{1} << 16, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

}  // namespace gradaccum::detail
