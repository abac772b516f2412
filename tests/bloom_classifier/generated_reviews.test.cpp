// SPDX-License-Identifier: Apache-2.0

#include "data/generated_reviews.hpp"

#include "data/generated_words.hpp"
#include "data/reviews.hpp"
#include "reviews_output.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

using namespace bloom;

namespace {

/// Returns a text's words without punctuation, line breaks and capitals.
std::vector<std::string> words_of(std::string text) {
  const std::string line_end = "<br /><br />";
  for (auto at = text.find(line_end); at != text.npos; at = text.find(line_end)) text.replace(at, line_end.size(), " ");
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word; words.push_back(word)) {
    word.erase(std::remove_if(word.begin(), word.end(), [](char c) { return c == '.' || c == '!' || c == ','; }),
               word.end());
    if (word[0] >= 'A' && word[0] <= 'Z') word[0] = static_cast<char>(word[0] - 'A' + 'a');
  }
  return words;
}

template <class Words>
bool holds(const Words& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// Returns the number of good words minus bad ones; with `hears_not`, a "not" inverts the next.
int score(const std::string& text, bool hears_not) {
  int sum = 0;
  std::string last;
  for (const auto& word : words_of(text)) {
    const int opinion = holds(good_words, word) ? 1 : holds(bad_words, word) ? -1 : 0;
    sum += hears_not && last == "not" ? -opinion : opinion;
    last = word;
  }
  return sum;
}

double accuracy(const std::vector<Review>& reviews, bool hears_not) {
  double right = 0;
  for (const auto& review : reviews) {
    const auto sum = score(review.text, hears_not);
    right += sum == 0 ? 0.5 : (sum > 0) == (review.label == 1) ? 1 : 0;
  }
  return right / static_cast<double>(reviews.size());
}

std::vector<double> sorted_lengths(const std::vector<Review>& reviews) {
  std::vector<double> lengths;
  for (const auto& review : reviews) lengths.push_back(static_cast<double>(words_of(review.text).size()));
  std::sort(lengths.begin(), lengths.end());
  return lengths;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const auto value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// Returns the distribution function of IMDB's lengths, which is lognormal.
double share_below(double length) { return 0.5 * std::erfc((5.495 - std::log(length)) / (0.6465 * std::sqrt(2.0))); }

/// Returns FNV-1a of all texts.
std::uint64_t hash_of(const std::vector<Review>& reviews) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const auto& review : reviews)
    for (const char c : review.text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace

TEST_CASE("Generated reviews: lengths are IMDB's") {
  const auto lengths = sorted_lengths(generated_reviews(4000, 1));
  REQUIRE(lengths.front() >= 10);
  REQUIRE(lengths.back() <= 1024);
  REQUIRE(mean(lengths) == Approx(296.2).epsilon(0.03));  // the mean of the lognormal within 10 and 1024
  for (const double quantile : {0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95}) {
    const auto length = lengths[static_cast<std::size_t>(quantile * static_cast<double>(lengths.size()))];
    CAPTURE(quantile, length);
    REQUIRE(share_below(length) == Approx(quantile).margin(0.02));
  }
}

TEST_CASE("Generated reviews: the table of lengths is the lognormal's") {
  const auto& lengths = bloom::detail::length_quantiles;
  for (std::size_t i = 1; i < 64; ++i) {
    const auto length = static_cast<double>(lengths[i]);
    REQUIRE(share_below(length - 0.51) < static_cast<double>(i) / 64);
    REQUIRE(share_below(length + 0.51) > static_cast<double>(i) / 64);
  }
  REQUIRE(lengths.front() == 10);
  REQUIRE(lengths.back() == 1024);
}

TEST_CASE("Generated reviews: a scale makes them shorter, to 10 words at least") {
  const auto lengths = sorted_lengths(generated_reviews(2000, 2, {.length_scale = 0.1}));
  REQUIRE(lengths.front() == 10);
  REQUIRE(lengths.back() <= 102);
  REQUIRE(mean(lengths) == Approx(29.3).epsilon(0.05));
  for (const auto length : sorted_lengths(generated_reviews(50, 2, {.length_scale = 1e-9}))) REQUIRE(length == 10);
  REQUIRE(sorted_lengths(generated_reviews(50, 2, {.length_scale = 3})).back() > 1100);
}

TEST_CASE("Generated reviews: labels are balanced, and can be learned, but not from single words only") {
  const auto reviews = generated_reviews(2001, 3, {.length_scale = 0.1});
  REQUIRE(reviews.size() == 2001);
  REQUIRE(std::count_if(reviews.begin(), reviews.end(), [](const Review& review) { return review.label == 1; }) ==
          1000);
  REQUIRE(count_labels(reviews, "reviews") == 2);
  REQUIRE(accuracy(reviews, true) == 1);
  REQUIRE(accuracy(reviews, false) > 0.7);
  REQUIRE(accuracy(reviews, false) < 0.95);

  const auto plain = generated_reviews(200, 3, {.negated_percent = 0});
  REQUIRE(accuracy(plain, false) == 1);
  const auto negated = generated_reviews(200, 3, {.negated_percent = 100});
  REQUIRE(accuracy(negated, true) == 1);
  REQUIRE(accuracy(negated, false) == 0);
  for (const auto& review :
       generated_reviews(200, 3, {.max_opinions = 5, .contrary_percent = 0, .negated_percent = 0})) {
    const auto sum = score(review.text, true);
    REQUIRE(std::abs(sum) >= 1);
    REQUIRE(std::abs(sum) <= 5);
    for (const auto& word : words_of(review.text))
      REQUIRE_FALSE((review.label == 1 ? holds(bad_words, word) : holds(good_words, word)));
  }
}

TEST_CASE("Generated reviews: have IMDB's line breaks, and sentences") {
  int line_ends = 0;
  for (const auto& review : generated_reviews(100, 4)) {
    if (review.text.find(".<br /><br />") != review.text.npos) ++line_ends;
    REQUIRE((review.text[0] >= 'A' && review.text[0] <= 'Z'));
    REQUIRE((review.text.back() == '.' || review.text.back() == '!'));
    REQUIRE(review.text.find("  ") == review.text.npos);
  }
  REQUIRE(line_ends > 50);
}

TEST_CASE("Generated reviews: a seed gives the same reviews everywhere, and another gives others") {
  REQUIRE(hash_of(generated_reviews(300, 1)) == 0xef2346073ba83b0cu);
  REQUIRE(hash_of(generated_reviews(300, 1, {.length_scale = 0.1})) == 0xb99830cdd2c37af7u);
  REQUIRE(generated_reviews(20, 1) == generated_reviews(20, 1));
  const auto some = generated_reviews(10, 1), more = generated_reviews(20, 1), others = generated_reviews(20, 2);
  for (std::size_t i = 0; i < some.size(); ++i) REQUIRE(some[i] == more[i]);
  for (std::size_t i = 0; i < more.size(); ++i) REQUIRE(more[i].text != others[i].text);
}

TEST_CASE("Generated reviews: made-up names have the frequencies of words of a language") {
  const auto reviews = generated_reviews(1500, 5, {.names = 10'000});
  std::map<std::string, int> counts;
  double words = 0;
  for (const auto& review : reviews) {
    std::istringstream stream(review.text);
    std::string before;
    for (std::string word; stream >> word; before = word, ++words)
      if (before == "with" || (before == "and" && word[0] <= 'Z')) ++counts[word.substr(0, 6)];
  }
  std::vector<double> sorted;
  double all = 0;
  for (const auto& [name, count] : counts) {
    REQUIRE(name.size() == 6);
    sorted.push_back(count);
    all += count;
  }
  std::sort(sorted.rbegin(), sorted.rend());
  REQUIRE(all / words > 0.1);
  REQUIRE(sorted.size() > 6000);  // of 10,000
  double sum = 0;
  for (int k = 1; k <= 10'000; ++k) sum += 1.0 / k;
  for (const std::size_t k : {1, 2, 3, 10, 30}) {
    CAPTURE(k);
    const double expected = all / sum / static_cast<double>(k);
    REQUIRE(std::abs(sorted[k - 1] - expected) < 5 * std::sqrt(expected));
  }
  REQUIRE(accuracy(reviews, true) == 1);
  REQUIRE(mean(sorted_lengths(reviews)) == Approx(296.2).epsilon(0.05));
  REQUIRE(hash_of(generated_reviews(300, 1, {.names = 1000})) == 0x064962062c58e035u);
}

TEST_CASE("MadeUpNames: each occurs once, up to the maximum") {
  std::set<std::string> names;
  const MadeUpNames all(1000);
  Random random(1);
  for (int i = 0; i < 200'000; ++i) names.insert(std::string(all.pick(random)));
  REQUIRE(names.size() == 1000);
  REQUIRE(MadeUpNames(0).empty());
  const MadeUpNames one(1);
  REQUIRE(one.pick(random) == one.pick(random));
}

TEST_CASE("Generated reviews: options out of range") {
  REQUIRE(generated_reviews(0, 1).empty());
  REQUIRE_ERROR("generated_reviews: count must be 0 or more, got -1", generated_reviews(-1, 1));
  for (const double scale : {0.0, -1.0, 101.0, std::nan("")})
    REQUIRE_ERROR("length_scale must be above 0 and at most 100, got",
                  generated_reviews(1, 1, {.length_scale = scale}));
  REQUIRE_ERROR("max_opinions must be 1 or more, got 0", generated_reviews(1, 1, {.max_opinions = 0}));
  REQUIRE_ERROR("contrary_percent must be 0 to 100, got 101", generated_reviews(1, 1, {.contrary_percent = 101}));
  REQUIRE_ERROR("names must be 0 to 512000, got -1", generated_reviews(1, 1, {.names = -1}));
  REQUIRE_ERROR("names must be 0 to 512000, got 512001", generated_reviews(1, 1, {.names = 512'001}));
  REQUIRE_ERROR("negated_percent must be 0 to 100, got -1", generated_reviews(1, 1, {.negated_percent = -1}));
}
