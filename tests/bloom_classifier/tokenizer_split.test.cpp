// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "tokenizer/splitter.hpp"

#include <set>

#include "bloom_classifier/tokenizer_data.hpp"
#include "tokenizer/byte_alphabet.hpp"

using namespace testing;
using namespace bloom;

namespace {

using Pieces = std::vector<std::string>;
using CodePoints = std::set<char32_t>;

const CodePoints& outside_words_in_python() {
  static const auto code_points = [] {
    const auto values = tokenizer_values("tokenizer_ids.json").at("outside_words");
    return CodePoints(values.begin(), values.end());
  }();
  return code_points;
}

std::string utf8(char32_t c) {
  const auto rest = [c](int shift) { return static_cast<char>(0x80 | (c >> shift & 0x3F)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | c >> 6), rest(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | c >> 12), rest(6), rest(0)};
  return {static_cast<char>(0xF0 | c >> 18), rest(12), rest(6), rest(0)};
}

/// Splits by definition: each code point is in a word or between words, and a space before a word belongs to it. A
/// piece ends where that changes, and before the space of a word.
Pieces pieces_by_definition(const std::u32string& text, const CodePoints& outside) {
  const auto in_word = [&](std::size_t i) {
    const bool next_is_inside = i + 1 < text.size() && !outside.contains(text[i + 1]);
    return !outside.contains(text[i]) || (text[i] == ' ' && next_is_inside);
  };
  Pieces pieces;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (i == 0 || in_word(i) != in_word(i - 1) || (in_word(i) && text[i] == ' ')) pieces.emplace_back();
    pieces.back() += utf8(text[i]);
  }
  return pieces;
}

Pieces pieces_of(std::string_view text) {
  Pieces pieces;
  while (!text.empty()) {
    pieces.emplace_back(next_piece(text));
    text.remove_prefix(pieces.back().size());
  }
  return pieces;
}

std::string utf8(const std::u32string& text) {
  std::string result;
  for (const auto c : text) result += utf8(c);
  return result;
}

std::u32string code_points_of(std::string_view text) {
  std::u32string result;
  while (!text.empty()) {
    const auto c = first_code_point(text);
    result += c.value;
    text.remove_prefix(c.size);
  }
  return result;
}

void require_pieces(const std::u32string& text) {
  const auto expected = pieces_by_definition(text, outside_words_in_python());
  if (pieces_of(utf8(text)) == expected) return;
  CAPTURE(utf8(text));
  REQUIRE(pieces_of(utf8(text)) == expected);
}

}  // namespace

TEST_CASE("splitter: pieces of some texts", "[tokenizer]") {
  REQUIRE(pieces_of("Hello (world), it's  fine!!") ==
          Pieces{"Hello", " (", "world", "),", " it's", " ", " fine", "!!"});
  REQUIRE(pieces_of("It's [great] {x} <br /><br />I") == Pieces{"It's", " [great]", " {x}", " <br", " /><br", " />I"});
  REQUIRE(pieces_of("a|b\n\n c \n") == Pieces{"a", "|", "b", "\n\n", " c", " \n"});
  REQUIRE(pieces_of("zero\u200Bwidth\u00A0no-break") == Pieces{"zero\u200Bwidth", "\u00A0", "no-break"});
  REQUIRE(pieces_of("  ") == Pieces{"  "});
  REQUIRE(pieces_of({"\0 \0", 3}) == Pieces{{"\0", 1}, {" \0", 2}});
  REQUIRE(pieces_of("").empty());
}

TEST_CASE("splitter: every code point, by the classes of Python's tokenizers", "[tokenizer]") {
  REQUIRE(outside_words_in_python().size() == 39);
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    if (is_outside_words(c) != outside_words_in_python().contains(c))
      FAIL("U+" << std::hex << static_cast<unsigned>(c));
    if (code_points_of(utf8(c)) != std::u32string(1, c)) FAIL("U+" << std::hex << static_cast<unsigned>(c));
    const bool is_sampled = c < 0x3100 || c % 61 == 0 || c >= 0x10FF00 || (c >= 0xFF00 && c < 0x10100);
    if (is_sampled) require_pieces({'a', c, 'b', ' ', c, ' ', c, c, ' ', ' ', c});
  }
}

TEST_CASE("splitter: sequences of two and three code points with some outside of words", "[tokenizer]") {
  CodePoints some = outside_words_in_python();
  for (const auto c : {U'a', U'[', U']', U'^', U'\\', U'\0', U'é', U'\u200B', U'漢', U'\U0001F600', U'\U0010FFFF'})
    some.insert(c);
  for (const auto a : some)
    for (const auto b : some) {
      require_pieces({a, b});
      require_pieces({'x', a, b, 'y'});
      require_pieces({a, ' ', b});
      for (const auto c : some) require_pieces({a, b, c});
    }
}

TEST_CASE("splitter: a class that ended at the first ] would give other ids", "[tokenizer]") {
  const auto trained = trained_tokenizer();
  auto wrong = outside_words_in_python();
  wrong.insert(U'[');
  const auto ids_by = [&](const std::string& text, const CodePoints& outside) {
    Ids ids;
    for (const auto& piece : pieces_by_definition(code_points_of(text), outside))
      for (const auto id : trained.encode(piece)) ids.push_back(id);
    return ids;
  };
  int texts = 0, differences = 0;
  for (const auto& row : sample()) {
    const bool has_added_tokens = row.text.find('<') != row.text.npos || row.text.find("New") != row.text.npos ||
                                  row.text.find("naïve") != row.text.npos;
    if (has_added_tokens) continue;  // added tokens are matched before pieces
    ++texts;
    REQUIRE(ids_by(row.text, outside_words_in_python()) == row.ids);
    differences += ids_by(row.text, wrong) != row.ids;
  }
  REQUIRE(texts > 1000);
  REQUIRE(differences > 0);
}

TEST_CASE("byte alphabet: each byte has a unique character", "[tokenizer]") {
  std::set<std::string> characters(byte_characters().begin(), byte_characters().end());
  REQUIRE(characters.size() == 256);
  REQUIRE(byte_characters()[' '] == "Ġ");
  REQUIRE(byte_characters()['\n'] == "Ċ");
  REQUIRE(byte_characters()['a'] == "a");
  REQUIRE(byte_characters()[0] == "Ā");
  REQUIRE(byte_characters()[0xAD] == "Ń");
  REQUIRE(byte_characters()[0xFF] == "ÿ");
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  REQUIRE(characters_to_bytes(bytes_to_characters(bytes)) == bytes);
  REQUIRE(characters_to_bytes("a b") == "a b");  // a space stands for no byte
  REQUIRE(characters_to_bytes("漢Ġ") == "漢Ġ");
}
