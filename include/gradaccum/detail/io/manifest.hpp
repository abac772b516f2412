// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/directory.hpp>
#include <gradaccum/detail/io/input_file.hpp>
#include <gradaccum/detail/io/manifest_reader.hpp>
#include <gradaccum/detail/io/manifest_text.hpp>
#include <gradaccum/detail/io/output_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Synced, as a new file. Throws `std::runtime_error` as the next two do: with the file's path.
inline void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  const auto text = text_of(manifest);
  OutputFile file(folder / manifest_name);
  file.write(text.data(), text.size());
  file.close();
}

inline Manifest read_manifest(const std::filesystem::path& folder) {
  const auto path = folder / manifest_name;
  InputFile file(path);
  if (file.bytes() > Manifest::max_bytes)
    throw std::runtime_error(path.string() + ": must have at most 64 MiB, got " + std::to_string(file.bytes()) +
                             " bytes");
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  text.resize(file.read(text.data(), text.size()));
  return manifest_of(text, path.string());
}

inline void check_file(const std::filesystem::path& path, const Manifest::File& expected) {
  const auto fail = [&path](const std::string& requirement, const std::string& got) {
    throw std::runtime_error(path.string() + ": must have " + requirement + ", as the manifest says, got " + got);
  };
  InputFile file(path);
  if (file.bytes() != expected.bytes) fail(std::to_string(expected.bytes) + " bytes", std::to_string(file.bytes()));
  std::vector<char> chunk(1 << 20);
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;
  while (const auto size = file.read(chunk.data(), chunk.size())) {
    crc = crc32(chunk.data(), size, crc);
    bytes += size;
  }
  if (crc != expected.crc32 || bytes != expected.bytes)
    fail("the CRC-32 " + crc32_text(expected.crc32), crc32_text(crc));
}

/// The folder has the files that the manifest lists, byte for byte, and no others.
inline void check_files(const std::filesystem::path& folder, const Manifest& manifest) {
  for (const auto& name : names_in(folder))
    if (name != manifest_name && manifest.files.count(name) == 0)
      throw std::runtime_error((folder / name).string() + ": must be listed in " + manifest_name + ", or not be there");
  for (const auto& [name, file] : manifest.files) check_file(folder / name, file);
}

}  // namespace gradaccum::detail
