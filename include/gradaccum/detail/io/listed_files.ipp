// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/listed_files.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace gradaccum::detail {

inline constexpr std::size_t chunk_of_listed_file = 1 << 20;

GRADACCUM_INLINE ListedFile::ListedFile(const std::filesystem::path& path, const Manifest::File& listed)
    : path_(path), listed_(listed), file_(path), left_(listed.bytes) {
  if (file_.bytes() != listed.bytes) fail(std::to_string(listed.bytes) + " bytes", std::to_string(file_.bytes()));
}

GRADACCUM_INLINE void ListedFile::read(void* data, std::uint64_t size) {
  for (auto* bytes = static_cast<char*>(data); size > 0;) {
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(size, chunk_of_listed_file));
    if (file_.read(bytes, wanted) != wanted) fail(std::to_string(listed_.bytes) + " bytes", "fewer");
    crc_ = crc32(bytes, wanted, crc_);  // while they are in the cache
    bytes += wanted;
    size -= wanted;
    left_ -= wanted;
  }
}

GRADACCUM_INLINE void ListedFile::read(std::span<const std::span<std::byte>> pieces, const ForEach& for_each) {
  std::vector<std::uint64_t> places{listed_.bytes - left_};
  for (auto piece : pieces) places.push_back(places.back() + piece.size());
  if (places.back() != listed_.bytes) fail(std::to_string(listed_.bytes) + " bytes", std::to_string(places.back()));
  std::vector<std::uint32_t> crcs(pieces.size());
  for_each(pieces.size(), [&](std::size_t i) { crcs[i] = read_piece(places[i], pieces[i]); });
  for (std::size_t i = 0; i < pieces.size(); ++i) crc_ = crc32_of_both(crc_, crcs[i], pieces[i].size());
  left_ = 0;
}

GRADACCUM_INLINE void ListedFile::check() const {
  if (crc_ != listed_.crc32) fail("the CRC-32 " + crc32_text(listed_.crc32), crc32_text(crc_));
}

GRADACCUM_INLINE void ListedFile::fail(const std::string& requirement, const std::string& got) const {
  throw std::runtime_error(path_.string() + ": must have " + requirement + ", as the manifest says, got " + got);
}

GRADACCUM_INLINE std::uint32_t ListedFile::read_piece(std::uint64_t place, std::span<std::byte> piece) const {
  std::uint32_t crc = 0;
  while (!piece.empty()) {
    const auto now = piece.first(std::min(piece.size(), chunk_of_listed_file));
    if (file_.read_at(place, now.data(), now.size()) != now.size())
      fail(std::to_string(listed_.bytes) + " bytes", "fewer");
    crc = crc32(now.data(), now.size(), crc);
    place += now.size();
    piece = piece.subspan(now.size());
  }
  return crc;
}

GRADACCUM_INLINE void check_file(const std::filesystem::path& path, const Manifest::File& listed) {
  ListedFile file(path, listed);
  std::vector<char> chunk(chunk_of_listed_file);
  while (file.left() > 0) file.read(chunk.data(), std::min<std::uint64_t>(file.left(), chunk.size()));
  file.check();
}

GRADACCUM_INLINE void check_no_others(const std::filesystem::path& folder, const Manifest& manifest) {
  for (const auto& name : names_in(folder))
    if (name != manifest_name && manifest.files.count(name) == 0)
      throw std::runtime_error((folder / name).string() + ": must be listed in " + manifest_name + ", or not be there");
}

GRADACCUM_INLINE void check_files(const std::filesystem::path& folder, const Manifest& manifest) {
  check_no_others(folder, manifest);
  for (const auto& [name, file] : manifest.files) check_file(folder / name, file);
}

}  // namespace gradaccum::detail
