// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/random.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bloom {

/// Unique names such as Belano. The k-th is 1/k as frequent as the first, like the words of a language (Zipf's law): a
/// few are in every text, and there are always new ones.
class MadeUpNames {
 public:
  static constexpr std::int64_t most = 80 * 80 * 80;  // three syllables

  explicit MadeUpNames(std::int64_t count) {
    std::uint64_t sum = 0;
    for (std::uint64_t k = 1; k <= static_cast<std::uint64_t>(count); ++k) {
      names_.push_back(name(k));
      sums_.push_back(sum += (std::uint64_t{1} << 40) / k);  // integers are the same on every machine
    }
  }

  bool empty() const { return names_.empty(); }

  std::string_view pick(Random& random) const {
    const auto found = std::upper_bound(sums_.begin(), sums_.end(), random.below(sums_.back()));
    return names_[static_cast<std::size_t>(found - sums_.begin())];
  }

 private:
  static std::string name(std::uint64_t k) {
    constexpr std::string_view consonants = "bdfgklmnprstvzhj", vowels = "aeiou";
    constexpr auto end = static_cast<std::uint64_t>(most);
    auto number = k * 314'159 % end;  // coprime to `most`, so each number occurs once
    std::string name;
    for (int syllable = 0; syllable < 3; ++syllable, number /= 80) {
      name += consonants[static_cast<std::size_t>(number % 80 / 5)];
      name += vowels[static_cast<std::size_t>(number % 5)];
    }
    name[0] = static_cast<char>(name[0] - 'a' + 'A');
    return name;
  }

  std::vector<std::string> names_;
  std::vector<std::uint64_t> sums_;  // cumulative frequencies
};

}  // namespace bloom
