// SPDX-License-Identifier: Apache-2.0
//
// Encodes texts by the example's tokenizer for BLOOM, on one thread: texts and tokenizer as python/tokenizer.py makes
// them, which encodes the same in Python. compare_processes.py runs both.

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness.hpp"
#include "tokenizer/bloom_tokenizer.hpp"

namespace {

using Ids = std::vector<std::vector<std::int64_t>>;

/// FNV-1a of all ids in 32 bits each, a -1 after each text: differs where they do.
std::string checksum(const Ids& all) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](std::int64_t id) { hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x100000001b3; };
  for (const auto& ids : all) {
    for (const auto id : ids) add(id);
    add(-1);
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder;
  const auto options = harness::parse(argc, argv, "Encoding by BLOOM's tokenizer, on one thread", [&](CLI::App& app) {
    app.add_option("folder", folder, "with a tokenizer.json, and texts.json: an array of strings")->required();
  });
  const auto texts = nlohmann::json::parse(std::ifstream(folder + "/texts.json")).get<std::vector<std::string>>();
  std::vector<double> times;
  Ids ids;
  for (int repeat = 0; repeat <= options.repeats; ++repeat) {
    const auto tokenizer = bloom::BloomTokenizer::from_file(folder + "/tokenizer.json");  // has met no word yet
    ids = Ids(texts.size());
    const auto elapsed = harness::seconds([&] {
      for (std::size_t i = 0; i < texts.size(); ++i) ids[i] = tokenizer.encode(texts[i]);
    });
    if (repeat > 0) times.push_back(elapsed);  // the first one warms up
  }
  harness::append_json(options, fmt::format(R"({{"contestant": "the example's BloomTokenizer", "median_s": {}, )"
                                            R"("ids": "{}"}})",
                                            harness::median(times), checksum(ids)));
}
