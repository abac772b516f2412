// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "tokenizer/byte_pairs.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "bloom_classifier/tokenizer_data.hpp"
#include "tokenizer/added_tokens.hpp"
#include "tokenizer/piece_cache.hpp"
#include "tokenizer/train_tokenizer.hpp"

using namespace testing;
using namespace bloom;

namespace {

using Tokens = std::vector<TokenId>;
using Rules = std::map<std::pair<TokenId, TokenId>, Merge>;

MergeTable table_of(const Rules& rules) {
  MergeTable table(rules.size());
  for (const auto& [pair, merge] : rules) table.set(pair.first, pair.second, merge);
  return table;
}

/// Merges by definition: repeatedly the lowest rank, the leftmost of several.
Tokens merged_by_definition(Tokens ids, const Rules& rules) {
  for (;;) {
    Merge best;
    std::size_t at = 0;
    for (std::size_t i = 1; i < ids.size(); ++i)
      if (const auto rule = rules.find({ids[i - 1], ids[i]}); rule != rules.end() && rule->second.rank < best.rank)
        best = rule->second, at = i;
    if (at == 0) return ids;
    ids[at - 1] = best.result;
    ids.erase(ids.begin() + static_cast<long>(at));
  }
}

/// Makes random merges of four letters and of their results.
Rules random_rules(std::mt19937& generator, std::size_t count) {
  std::vector<std::string> tokens{"a", "b", "c", "d"};
  std::map<std::string, TokenId> ids{{"a", 0}, {"b", 1}, {"c", 2}, {"d", 3}};
  Rules rules;
  while (rules.size() < count) {
    const auto left = tokens[generator() % tokens.size()], right = tokens[generator() % tokens.size()];
    if ((left + right).size() > 8 || rules.contains({ids[left], ids[right]})) continue;
    const auto [token, is_new] = ids.try_emplace(left + right, static_cast<TokenId>(tokens.size()));
    if (is_new) tokens.push_back(token->first);
    rules[{ids[left], ids[right]}] = {static_cast<std::int32_t>(rules.size()), token->second};
  }
  std::vector<std::int32_t> ranks(rules.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), generator);
  for (std::size_t i = 0; auto& rule : rules) rule.second.rank = ranks[i++];
  return rules;
}

}  // namespace

TEST_CASE("merges: short and long pieces are joined as the definition says", "[tokenizer]") {
  std::mt19937 generator(4);
  for (int round = 0; round < 300; ++round) {
    const auto rules = random_rules(generator, 1 + generator() % 40);
    const auto table = table_of(rules);
    Tokens ids(generator() % 90);
    const auto letters = 1 + generator() % 4;
    for (auto& id : ids) id = static_cast<TokenId>(generator() % letters);
    const auto expected = merged_by_definition(ids, rules);
    auto by_short = ids, by_long = ids, by_either = ids;
    merge_short(by_short, table);
    merge_long(by_long, table);
    merge_pairs(by_either, table);
    REQUIRE(by_short == expected);
    REQUIRE(by_long == expected);
    REQUIRE(by_either == expected);
  }
}

TEST_CASE("merges: a table finds exactly the entries that were set", "[tokenizer]") {
  std::mt19937 generator(5);
  Rules rules;
  while (rules.size() < 5000)
    rules[{static_cast<TokenId>(generator() % 300000), static_cast<TokenId>(generator() % 300)}] = {
        static_cast<std::int32_t>(rules.size()), static_cast<TokenId>(generator() % 300000)};
  const auto table = table_of(rules);
  for (const auto& [pair, merge] : rules) {
    REQUIRE(table.find(pair.first, pair.second).rank == merge.rank);
    REQUIRE(table.find(pair.first, pair.second).result == merge.result);
    const auto swapped = rules.contains({pair.second, pair.first});
    REQUIRE((table.find(pair.second, pair.first).rank != Merge::never) == swapped);
  }
  REQUIRE(MergeTable().find(0, 0).rank == Merge::never);
}

TEST_CASE("added tokens: the leftmost token is found, and of several the longest", "[tokenizer]") {
  AddedTokens tokens;
  std::string found;
  const auto split = [&](std::string_view text) {
    found.clear();
    tokens.split(
        text, [&](std::string_view part) { found += "(" + std::string(part) + ")"; },
        [&](TokenId id) { found += std::to_string(id); });
    return found;
  };
  REQUIRE(split("abc") == "(abc)");
  REQUIRE(split("").empty());
  tokens.add("ab", 1);
  tokens.add("abcd", 2);
  tokens.add("cde", 3);
  tokens.add("\xC3", 4);
  REQUIRE(split("ababcdex") == "12(ex)");
  REQUIRE(split("xabcx") == "(x)1(cx)");
  REQUIRE(split("abcde") == "2(e)");
  REQUIRE(split("acdea\xC3z") == "(a)3(a)4(z)");
}

TEST_CASE("piece cache: encodes a piece once, and again after a failure", "[tokenizer]") {
  PieceCache cache;
  int calls = 0;
  const auto encode = [&](std::string_view piece, Tokens& ids) {
    ++calls;
    ids.push_back(static_cast<TokenId>(piece.size()));
    if (piece == "bad") throw std::runtime_error("bad");
  };
  REQUIRE(cache.ids_of(1, "word", encode) == Tokens{4});
  REQUIRE(cache.ids_of(1, "word", encode) == Tokens{4});
  REQUIRE(calls == 1);
  REQUIRE(cache.ids_of(2, "word", encode) == Tokens{4});
  REQUIRE(calls == 2);
  for (int i = 0; i < 2; ++i) REQUIRE_ERROR("bad", cache.ids_of(1, "bad", encode));
  REQUIRE(calls == 4);
  const auto fail = [](std::string_view, Tokens& ids) {
    ids.push_back(-7);
    throw std::runtime_error("fail");
  };
  REQUIRE_ERROR("fail", cache.ids_of(1, "word", fail));  // in the slot of the other owner's ids
  REQUIRE(cache.ids_of(2, "word", encode) == Tokens{4});
  for (int i = 0; i < 100'000; ++i) {  // three times the number of slots
    const auto piece = std::string(static_cast<std::size_t>(i % 50), 'x') + std::to_string(i);
    REQUIRE(cache.ids_of(1, piece, encode) == Tokens{static_cast<TokenId>(piece.size())});
  }
}

TEST_CASE("train_tokenizer: the tokens and merges of Python's BpeTrainer", "[tokenizer]") {
  auto texts = texts_of(sample());
  texts.resize(1000);  // as in tokenizer_values.py
  const auto trained = train_tokenizer(texts, 1200);
  const auto expected = tokenizer_values("tokenizer.json");
  REQUIRE(trained.at("model") == expected.at("model"));
  REQUIRE(trained.at("pre_tokenizer") == expected.at("pre_tokenizer"));
  for (std::size_t i = 0; i < 4; ++i) REQUIRE(trained.at("added_tokens").at(i) == expected.at("added_tokens").at(i));

  const auto tokenizer = tokenizer_of(trained);
  REQUIRE(tokenizer.vocabulary_size() == 1200);
  for (const auto& text : texts) REQUIRE(tokenizer.decode(tokenizer.encode(text)) == text);
}

TEST_CASE("train_tokenizer: few texts give few tokens", "[tokenizer]") {
  const auto size_for = [](std::vector<std::string> texts, std::int64_t size) {
    return tokenizer_of(train_tokenizer(texts, size)).vocabulary_size();
  };
  REQUIRE(size_for({}, 260) == 260);
  REQUIRE(size_for({}, 1000) == 260);
  REQUIRE(size_for({"", "a"}, 1000) == 260);
  REQUIRE(size_for({"abc abc"}, 1000) == 263);  // ab, abc, and abc with a space
  REQUIRE(size_for({"abc abc"}, 261) == 261);
  REQUIRE(size_for({"\xFF\xFF"}, 1000) == 263);  // U+FFFD twice, three bytes each
  for (const std::int64_t size : {-1, 259, (1 << 20) + 1})
    REQUIRE_ERROR("vocabulary_size must be at least 260, the special tokens and the bytes, and at most 1048576, got " +
                      std::to_string(size),
                  size_for({}, size));
  REQUIRE(size_for({std::string(4096, 'a')}, 1000) == 272);  // runs of 2, 4, ... 4096
  REQUIRE(size_for({std::string(4097, 'a')}, 1000) == 260);
  REQUIRE(size_for({std::string(4096, ' ')}, 1000) == 272);
}
