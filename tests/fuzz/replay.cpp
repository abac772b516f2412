// SPDX-License-Identifier: Apache-2.0
//
// Replaces libFuzzer: tries the files of a corpus, and COUNT mutations of them, the same every time.
// gradaccum.tests.fuzz NAME CORPUS COUNT

#include "replay.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

namespace {

std::mt19937_64 generator(1);

std::size_t below(std::size_t end) { return end == 0 ? 0 : generator() % end; }

std::vector<std::string> read_all(const std::filesystem::path& corpus) {
  std::vector<std::filesystem::path> paths;
  for (auto& entry : std::filesystem::directory_iterator(corpus)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> files;
  for (auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return files;
}

void mutate(std::string& bytes, const std::vector<std::string>& files) {
  static const std::string telling = "{}[]\",:0123456789-.eE\\ \xff\x80\x01";
  const auto at = below(bytes.size());
  switch (below(6)) {
    case 0:
      if (!bytes.empty()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
      break;
    case 1:
      if (!bytes.empty()) bytes[at] = telling[below(telling.size())];
      break;
    case 2:
      bytes.insert(at, 1, telling[below(telling.size())]);
      break;
    case 3:
      bytes.erase(at, below(16));
      break;
    case 4:  // repeats a part
      bytes.insert(at, bytes.substr(below(bytes.size()), below(64)));
      break;
    default: {
      const auto& other = files[below(files.size())];
      bytes.replace(at, below(32), other.substr(below(other.size()), below(32)));
    }
  }
}

}  // namespace

int main(int argc, char* argv[]) {
  const auto target = argc == 4 ? find_target(argv[1]) : nullptr;
  if (target == nullptr) return std::fprintf(stderr, "usage: gradaccum.tests.fuzz NAME CORPUS COUNT\n"), 2;
  const auto try_out = [&](const std::string& bytes) {
    target(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  };
  const auto files = read_all(argv[2]);
  if (files.empty()) return std::fprintf(stderr, "%s must have files\n", argv[2]), 1;
  for (auto& file : files) try_out(file);
  const auto count = std::stoul(argv[3]);
  for (std::size_t i = 0; i < count; ++i) {
    auto bytes = files[below(files.size())];
    for (auto edits = 1 + below(4); edits > 0; --edits) mutate(bytes, files);
    try_out(bytes);
  }
  std::printf("%zu files, %zu mutations\n", files.size(), static_cast<std::size_t>(count));
  return 0;
}
