// SPDX-License-Identifier: Apache-2.0
//
// Encodes texts by the example's tokenizer for BLOOM, on one thread. python/tokenizer.py makes texts and tokenizer, and
// encodes the same in Python. compare_processes.py runs both.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bloom_tokenizer.hpp"

namespace {

using Ids = std::vector<std::vector<std::int64_t>>;

/// FNV-1a of all ids in 32 bits each, with a -1 after each text, to compare them with Python's.
std::string checksum(const Ids& all) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](std::int64_t id) { hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x100000001b3; };
  for (const auto& ids : all) {
    for (const auto id : ids) add(id);
    add(-1);
  }
  return fmt::format("{:016x}", hash);
}

/// Returns the seconds to encode all texts by a new tokenizer, whose cache is empty.
double encode(const std::string& tokenizer_json, const std::vector<std::string>& texts, Ids& ids) {
  const auto tokenizer = bloom::BloomTokenizer::from_file(tokenizer_json);
  ids = Ids(texts.size());
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < texts.size(); ++i) ids[i] = tokenizer.encode(texts[i]);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 || std::string_view(argv[2]) != "--json") {
    fmt::print(stderr, "usage: tokenizer FOLDER --json RESULT, FOLDER with tokenizer.json and texts.json\n");
    return 2;
  }
  const std::string folder = argv[1];
  const auto texts = nlohmann::json::parse(std::ifstream(folder + "/texts.json")).get<std::vector<std::string>>();
  constexpr std::size_t repeats = 7;
  std::vector<double> times;
  Ids ids;
  encode(folder + "/tokenizer.json", texts, ids);  // warms up
  for (std::size_t i = 0; i < repeats; ++i) times.push_back(encode(folder + "/tokenizer.json", texts, ids));
  std::sort(times.begin(), times.end());
  std::ofstream(argv[3], std::ios::app)
      << fmt::format(R"({{"contestant": "the example's BloomTokenizer", "median_s": {}, "ids": "{}"}})",
                     times[repeats / 2], checksum(ids))
      << '\n';
}
