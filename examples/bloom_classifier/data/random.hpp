// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace bloom {

/// Random numbers that depend only on the seed. std::mt19937_64 gives the same bits everywhere; std::shuffle and the
/// standard distributions differ between standard libraries.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  /// Returns 64 random bits.
  std::uint64_t bits() { return engine_(); }

  /// Returns 0 to end - 1, all equally likely. `end` must not be 0.
  std::uint64_t below(std::uint64_t end) {
    const auto surplus = -end % end;  // 2^64 mod end: rejecting these makes all remainders equally likely
    auto number = bits();
    while (number < surplus) number = bits();
    return number % end;
  }

  bool percent(int chance) { return below(100) < static_cast<std::uint64_t>(chance); }

  /// Shuffles by Fisher and Yates: all orders are equally likely.
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (auto i = items.size(); i > 1; --i) std::swap(items[i - 1], items[static_cast<std::size_t>(below(i))]);
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace bloom
