// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/generated_words.hpp"
#include "data/made_up_names.hpp"
#include "data/random.hpp"
#include "data/reviews.hpp"
#include "data/text_file.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bloom {

struct GeneratedReviewsOptions {
  double length_scale = 1;    ///< relative to IMDB's lengths: 0.1 makes a median of 24 words
  int max_opinions = 8;       ///< per review: each calls something good or bad
  int contrary_percent = 25;  ///< of opinions that contradict the label; always a minority
  int negated_percent = 25;   ///< of opinions that use the opposite word and "not"
  std::int64_t names = 0;     ///< made-up names, which enlarge the vocabulary as in IMDB
};

namespace detail {

/// Quantiles 0/64, 1/64, ... 64/64 of the lengths of IMDB's reviews in tokens: exp(5.495 + 0.6465 z), where z is the
/// standard normal distribution's quantile, within 10 and 1024. Integers are the same on every machine.
inline constexpr std::array<std::uint64_t, 65> length_quantiles = {
    10,  60,  73,  82,  90,  97,  104, 110, 116, 121, 127, 132, 137, 142, 147, 152, 157, 162, 167, 172, 178, 183,
    188, 193, 198, 203, 209, 214, 220, 226, 231, 237, 243, 250, 256, 263, 270, 277, 284, 291, 299, 307, 316, 325,
    334, 344, 354, 365, 377, 389, 402, 417, 432, 449, 468, 489, 512, 539, 571, 609, 656, 719, 812, 980, 1024};

/// Draws a length. Between two quantiles all lengths are equally likely.
inline std::uint64_t review_length(Random& random) {
  const auto i = static_cast<std::size_t>(random.below(length_quantiles.size() - 1));
  return length_quantiles[i] + random.below(length_quantiles[i + 1] - length_quantiles[i] + 1);
}

using Words = std::vector<std::string_view>;

template <std::size_t size>
std::string_view pick(const std::array<std::string_view, size>& words, Random& random) {
  return words[static_cast<std::size_t>(random.below(size))];
}

inline constexpr std::size_t max_opinion_words = 9;

inline Words opinion(Random& random, bool is_good, bool is_negated) {
  Words words;
  if (random.percent(25)) words = {"if", "you", "ask", "me,"};
  words.insert(words.end(), {"the", pick(aspects, random), "was"});
  if (is_negated) words.push_back("not");
  words.push_back(pick(is_good != is_negated ? good_words : bad_words, random));
  return words;
}

/// Adds names, as in "with Belano and Tirasu", if they fit.
inline void add_names(Words& words, Random& random, std::size_t room, const MadeUpNames& names) {
  for (const auto* before : {"with", "and", "and"}) {
    if (words.size() + 2 > room || !random.percent(75)) return;
    words.insert(words.end(), {before, names.pick(random)});
  }
}

/// Makes a sentence of at most `room` words that does not depend on the label.
inline Words remark(Random& random, std::size_t room, const MadeUpNames& names) {
  static const std::array<Words, 4> shortest = {
      {{"anyway"}, {"and", "yet"}, {"so", "it", "goes"}, {"and", "so", "it", "goes"}}};
  if (room <= shortest.size()) return shortest[room - 1];
  Words words;
  if (room >= 8 && random.percent(20)) words = {"in", "the", "end,"};
  words.insert(words.end(), {"the", pick(people, random), pick(verbs, random), "the", pick(things, random)});
  if (words.size() + 3 <= room && random.percent(50)) words.insert(words.end(), {"in", "the", pick(places, random)});
  if (!names.empty()) add_names(words, random, room, names);
  return words;
}

inline std::string sentence_of(const Words& words, Random& random) {
  std::string sentence;
  for (const auto word : words) (sentence += sentence.empty() ? "" : " ") += word;
  sentence[0] = static_cast<char>(sentence[0] - 'a' + 'A');
  return sentence + (random.percent(10) ? '!' : '.');
}

/// Mixes opinions, most of which agree with the label, and remarks, `length` words in all.
inline std::string review_text(Random& random, bool is_good, std::size_t length, const GeneratedReviewsOptions& options,
                               const MadeUpNames& names) {
  const auto most =
      std::min<std::uint64_t>(static_cast<std::uint64_t>(options.max_opinions), length / max_opinion_words);
  const auto opinions = 1 + random.below(most);
  std::vector<std::string> sentences;
  const auto add = [&](const Words& words) {
    length -= words.size();
    sentences.push_back(sentence_of(words, random));
  };
  std::uint64_t contrary = 0;
  for (std::uint64_t i = 0; i < opinions; ++i) {
    const bool is_contrary = random.percent(options.contrary_percent) && 2 * (contrary + 1) < opinions;
    if (is_contrary) ++contrary;
    add(opinion(random, is_good != is_contrary, random.percent(options.negated_percent)));
  }
  while (length > 0) add(remark(random, length, names));
  random.shuffle(sentences);
  std::string text = sentences[0];
  for (std::size_t i = 1; i < sentences.size(); ++i)
    (text += random.percent(15) ? "<br /><br />" : " ") += sentences[i];  // line breaks as in IMDB
  return text;
}

inline void check_options(std::int64_t count, const GeneratedReviewsOptions& options) {
  const auto require = [](bool holds, const char* requirement, double value) {
    if (!holds) data_error("generated_reviews", requirement, ", got ", value);
  };
  const auto is_percentage = [](int percent) { return percent >= 0 && percent <= 100; };
  require(count >= 0, "count must be 0 or more", static_cast<double>(count));
  require(options.length_scale > 0 && options.length_scale <= 100, "length_scale must be above 0 and at most 100",
          options.length_scale);
  require(options.max_opinions >= 1, "max_opinions must be 1 or more", options.max_opinions);
  require(is_percentage(options.contrary_percent), "contrary_percent must be 0 to 100", options.contrary_percent);
  require(is_percentage(options.negated_percent), "negated_percent must be 0 to 100", options.negated_percent);
  require(options.names >= 0 && options.names <= MadeUpNames::most, "names must be 0 to 512000",
          static_cast<double>(options.names));
}

}  // namespace detail

/// Generates English reviews whose label can be learned, to try a model without a data set.
///
///     auto reviews = bloom::generated_reviews(2000, 1, {.length_scale = 0.1});
///
/// The label is 1 if most opinions are good, 0 if most are bad; labels alternate. Single words mislead, as "was not
/// great" is a bad opinion. Lengths in words are distributed as IMDB's in tokens, scaled; at least 10.
/// A seed gives the same reviews everywhere.
inline std::vector<Review> generated_reviews(std::int64_t count, std::uint64_t seed,
                                             const GeneratedReviewsOptions& options = {}) {
  detail::check_options(count, options);
  constexpr double min_length = 10;
  Random random(seed);
  const MadeUpNames names(options.names);
  std::vector<Review> reviews;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto length = static_cast<double>(detail::review_length(random)) * options.length_scale;
    const auto words = static_cast<std::size_t>(std::max(length, min_length));
    reviews.push_back({detail::review_text(random, i % 2 == 1, words, options, names), i % 2});
  }
  return reviews;
}

}  // namespace bloom
