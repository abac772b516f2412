// SPDX-License-Identifier: Apache-2.0
//
// Reads arbitrary bytes as a tokenizer.json, and encodes them as a text.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bloom_tokenizer.hpp"
#include "tokenizer/train_tokenizer.hpp"

using namespace bloom;

namespace {

const std::string path = "a/file";
const TokenizerFileReader reader(path);

void require(bool condition) {
  if (!condition) std::abort();
}

/// Encodes a text. Ids must be tokens, and truncation must keep the first ones.
std::vector<std::int64_t> encode(const BloomTokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text);
  for (const auto id : ids) require(id >= 0 && id < tokenizer.vocabulary_size());
  const auto half = tokenizer.encode(text, ids.size() / 2);
  require(std::vector<std::int64_t>(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(ids.size() / 2)) == half);
  return ids;
}

void check_pieces(std::string_view text) {
  while (!text.empty()) {
    const auto piece = next_piece(text);
    require(!piece.empty() && piece.data() == text.data() && piece.size() <= text.size());
    text.remove_prefix(piece.size());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const BloomTokenizer tokenizer(reader.parse(bytes));
    tokenizer.decode(encode(tokenizer, bytes));
    tokenizer.decode(encode(tokenizer, "abcd abab. aaaaaaaa\n\nab<s>cd</s> é"));
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).starts_with(path + ": "));
  }

  static const BloomTokenizer trained(
      reader.parse(train_tokenizer(std::vector<std::string>{"abcd abab ab", "漢字漢字 😀😀 ..."}, 300).dump()));
  const auto text = to_utf8(bytes);
  require(is_utf8(text));
  check_pieces(bytes);
  check_pieces(text);
  require(trained.decode(encode(trained, bytes)) == text);
  return 0;
}
