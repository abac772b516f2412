// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "tokenizer/bloom_tokenizer.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "bloom_classifier/tokenizer_data.hpp"
#include "tokenizer/encode_all.hpp"

using namespace testing;
using namespace bloom;

namespace {

std::string repeated(const std::string& part, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += part;
  return text;
}

std::string from_hexadecimal(const std::string& digits) {
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2)
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

}  // namespace

TEST_CASE("BloomTokenizer: ids are those of Python's tokenizers", "[tokenizer]") {
  const auto tokenizer = trained_tokenizer();
  const auto rows = sample();
  REQUIRE(rows.size() == 2000);
  for (const auto& row : rows) {
    CAPTURE(row.text);
    REQUIRE(tokenizer.encode(row.text) == row.ids);
  }
}

TEST_CASE("BloomTokenizer: ids also match for tokenizer files of other kinds", "[tokenizer]") {
  const auto kinds = tokenizer_values("tokenizer_kinds.json");
  REQUIRE(kinds.size() == 13);
  for (const auto& kind : kinds) {
    const auto tokenizer = tokenizer_of(kind.at("tokenizer"));
    for (const auto& row : encoded_in_python(kind.at("texts"))) {
      INFO(kind.at("name").get<std::string>() << ": " << row.text);
      REQUIRE(tokenizer.encode(row.text) == row.ids);
    }
  }
}

TEST_CASE("BloomTokenizer: the order of the merges matters to these texts", "[tokenizer]") {
  const auto forwards = tokenizer_of(tokenizer_kind("merges as pairs"));
  const auto backwards = tokenizer_of(tokenizer_kind("merges backwards"));
  const auto repeated_last = tokenizer_of(tokenizer_kind("the last of equal merges counts"));
  const Ids abc = forwards.encode("abc");
  REQUIRE(abc != backwards.encode("abc"));
  REQUIRE(abc != repeated_last.encode("abc"));
}

TEST_CASE("BloomTokenizer: decode returns the encoded text", "[tokenizer]") {
  const auto tokenizer = trained_tokenizer();
  for (const auto& row : sample()) {
    CAPTURE(row.text);
    REQUIRE(tokenizer.decode(row.ids) == row.text);
  }
  REQUIRE(tokenizer.decode({}).empty());
}

TEST_CASE("BloomTokenizer: ids that end within a character decode to U+FFFD", "[tokenizer]") {
  const auto tokenizer = tokenizer_of(tokenizer_kind("no merges"));
  auto ids = tokenizer.encode("a😀");
  REQUIRE(ids.size() == 5);
  ids.pop_back();
  REQUIRE(tokenizer.decode(ids) == "a\uFFFD");
}

TEST_CASE("BloomTokenizer: decode refuses invalid ids", "[tokenizer]") {
  const auto tokenizer = trained_tokenizer();
  for (const std::int64_t id : {std::int64_t{-1}, tokenizer.vocabulary_size(), std::int64_t{1} << 40})
    REQUIRE_ERROR("BloomTokenizer: ids must be at least 0 and below 1202, got " + std::to_string(id),
                  tokenizer.decode(Ids{5, id}));
  REQUIRE(tokenizer.decode(Ids{1201}) == "naïve");
}

TEST_CASE("BloomTokenizer: invalid UTF-8 is read as by Python's errors='replace'", "[tokenizer]") {
  const auto tokenizer = trained_tokenizer();
  const auto values = tokenizer_values("tokenizer_ids.json");
  for (const auto& row : values.at("invalid_utf8")) {
    const auto bytes = from_hexadecimal(row.at(0));
    CAPTURE(row.at(0).get<std::string>());
    REQUIRE(to_utf8(bytes) == row.at(1).get<std::string>());
    REQUIRE(is_utf8(bytes) == (to_utf8(bytes) == bytes));
    REQUIRE(tokenizer.encode(bytes) == row.at(2).get<Ids>());
  }
}

TEST_CASE("BloomTokenizer: is_utf8 finds a bad byte anywhere", "[tokenizer]") {
  for (std::size_t at = 0; at < 40; ++at) {
    std::string text(40, 'a');
    REQUIRE(is_utf8(text));
    text[at] = '\x80';
    REQUIRE_FALSE(is_utf8(text));
  }
  REQUIRE(is_utf8(""));
  REQUIRE_FALSE(is_utf8("aaaaaaaa\xC3"));
}

TEST_CASE("BloomTokenizer: truncation keeps the first ids", "[tokenizer]") {
  const auto tokenizer = trained_tokenizer();
  for (const auto& row : sample())
    for (const std::size_t length : {0u, 1u, 2u, 5u, 1024u}) {
      const auto expected = std::min(length, row.ids.size());
      REQUIRE(tokenizer.encode(row.text, length) ==
              Ids(row.ids.begin(), row.ids.begin() + static_cast<long>(expected)));
    }
}

TEST_CASE("BloomTokenizer: tokens and the size of the vocabulary", "[tokenizer]") {
  const auto tokenizer = trained_tokenizer();
  REQUIRE(tokenizer.vocabulary_size() == 1202);
  REQUIRE(tokenizer.token_to_id("<unk>") == 0);
  REQUIRE(tokenizer.token_to_id("<pad>") == 3);
  REQUIRE(tokenizer.token_to_id("naïve") == 1201);
  REQUIRE(tokenizer.token_to_id("Ġthe") == tokenizer.encode(" the").at(0));
  REQUIRE_FALSE(tokenizer.token_to_id(" the"));
  REQUIRE_FALSE(tokenizer.token_to_id(""));
}

// A quadratic algorithm would take hours.
TEST_CASE("BloomTokenizer: pieces of a megabyte", "[tokenizer]") {
  constexpr std::size_t count = 1'000'000;
  const auto pairs = tokenizer_of(tokenizer_kind("merges as pairs"));
  const auto aaaa = *pairs.token_to_id("aaaa"), abcd = *pairs.token_to_id("abcd"), dots = *pairs.token_to_id("..");
  REQUIRE(pairs.encode(std::string(count, 'a')) == Ids(count / 4, aaaa));
  REQUIRE(pairs.encode(repeated("abcd", count / 4)) == Ids(count / 4, abcd));
  REQUIRE(pairs.encode(std::string(count, '.')) == Ids(count / 2, dots));
  REQUIRE(pairs.encode(std::string(count, ' ')) == Ids(count, *pairs.token_to_id("Ġ")));
  REQUIRE(pairs.encode(repeated("<unk", count / 4)).size() == count);

  const auto tokenizer = trained_tokenizer();
  std::mt19937 generator(1);
  std::string letters;
  for (std::size_t i = 0; i < count; ++i) letters += "etaoin"[generator() % 6];
  REQUIRE(tokenizer.decode(tokenizer.encode(letters)) == letters);
}

TEST_CASE("BloomTokenizer: tokenizers on one thread do not use each other's cached pieces", "[tokenizer]") {
  const auto first = tokenizer_of(tokenizer_kind("merges as pairs"));
  const auto second = tokenizer_of(tokenizer_kind("no merges"));
  const auto copy = first;
  for (int i = 0; i < 3; ++i) {
    REQUIRE(first.encode("abcd abcd").size() == 3);
    REQUIRE(second.encode("abcd abcd").size() == 9);
    REQUIRE(copy.encode("abcd abcd") == first.encode("abcd abcd"));
  }
}

TEST_CASE("encode_all: several threads give the result of one", "[tokenizer]") {
  const auto tokenizer = trained_tokenizer();
  const auto rows = sample();
  const auto texts = texts_of(rows);
  for (const int threads : {1, 2, 5, 3000}) {
    const auto ids = encode_all(tokenizer, texts, 1024, threads);
    REQUIRE(ids.size() == rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) REQUIRE(ids[i] == rows[i].ids);
  }
  REQUIRE(encode_all(tokenizer, texts, 2, 3)[5].size() == 2);
  REQUIRE(encode_all(tokenizer, {}, 1024, 2).empty());
  REQUIRE_ERROR("threads must be at least 1, got 0", encode_all(tokenizer, texts, 1024, 0));
}

TEST_CASE("parallel_for: each index is processed once, on several threads", "[tokenizer]") {
  std::vector<int> calls(1000);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  parallel_for(calls.size(), 4, [&](std::size_t i) {
    ++calls[i];
    std::this_thread::yield();
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  REQUIRE(std::count(calls.begin(), calls.end(), 1) == 1000);
  REQUIRE(threads.size() >= 1);
  REQUIRE(threads.size() <= 4);
}

TEST_CASE("parallel_for: an exception is rethrown in the caller, and ends the work", "[tokenizer]") {
  for (const int threads : {1, 4}) {
    std::atomic<std::size_t> calls = 0;
    REQUIRE_ERROR("the tenth", parallel_for(1'000'000, threads, [&](std::size_t i) {
                    ++calls;
                    if (i == 9) throw std::runtime_error("the tenth");
                    std::this_thread::yield();
                  }));
    REQUIRE(calls >= 10);
    REQUIRE(calls < 1'000'000);
  }
}
