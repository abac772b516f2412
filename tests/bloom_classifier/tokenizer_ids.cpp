// SPDX-License-Identifier: Apache-2.0
//
// For compare_tokenizers.py. Reads texts from standard input, each after its size in 4 bytes, little-endian.
//
//     tokenizer_ids ids TOKENIZER_JSON
//         writes of each text the number of ids, the ids, and what they decode to after its size
//     tokenizer_ids train SIZE
//         writes a tokenizer.json trained on them

#include <cstdint>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tokenizer/bloom_tokenizer.hpp"
#include "tokenizer/train_tokenizer.hpp"

namespace {

bool read_text(std::string& text) {
  std::uint32_t size = 0;
  if (!std::cin.read(reinterpret_cast<char*>(&size), 4)) return false;
  text.resize(size);
  return static_cast<bool>(std::cin.read(text.data(), size));
}

void write_number(std::size_t number) {
  const auto bytes = static_cast<std::uint32_t>(number);
  std::cout.write(reinterpret_cast<const char*>(&bytes), 4);
}

std::vector<std::string> read_texts() {
  std::vector<std::string> texts;
  for (std::string text; read_text(text);) texts.push_back(text);
  return texts;
}

void write_ids(const std::string& tokenizer_json) {
  const auto tokenizer = bloom::BloomTokenizer::from_file(tokenizer_json);
  for (std::string text; read_text(text);) {
    const auto ids = tokenizer.encode(text);
    write_number(ids.size());
    for (const auto id : ids) write_number(static_cast<std::size_t>(id));
    const auto decoded = tokenizer.decode(ids);
    write_number(decoded.size());
    std::cout << decoded;
  }
}

}  // namespace

int main(int argc, char* argv[]) try {
  std::ios::sync_with_stdio(false);
  const std::string mode = argc > 2 ? argv[1] : "";
  if (mode == "ids" && argc == 3) {
    write_ids(argv[2]);
  } else if (mode == "train" && argc == 3) {
    std::cout << bloom::train_tokenizer(read_texts(), std::stoll(argv[2]));
  } else {
    std::cerr << "usage: tokenizer_ids ids TOKENIZER_JSON | train SIZE\n";
    return 2;
  }
  return std::cout.flush() ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
