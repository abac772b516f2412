// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fashion_mnist {

/// The number of micro-batches per update, by epoch: `4` throughout, or `0:8,4:2` for 8 from epoch 0 and 2 from
/// epoch 4 on (counted from 0).
class AccumulationSchedule {
 public:
  AccumulationSchedule() : AccumulationSchedule("1") {}

  explicit AccumulationSchedule(std::string_view text) : text_(text) {
    if (text.find(':') == std::string_view::npos) {
      steps_[0] = parse_number(text, 1);
      return;
    }
    for (std::size_t begin = 0; begin <= text.size();) {
      const auto end = std::min(text.find(',', begin), text.size());
      add_entry(text.substr(begin, end - begin));
      begin = end + 1;
    }
    if (!steps_.contains(0)) reject();
  }

  std::int64_t steps(std::int64_t epoch) const { return std::prev(steps_.upper_bound(epoch))->second; }
  const std::map<std::int64_t, std::int64_t>& by_epoch() const { return steps_; }
  const std::string& text() const { return text_; }

 private:
  static constexpr std::int64_t max_number = 1'000'000;

  void add_entry(std::string_view entry) {
    const auto colon = entry.find(':');
    if (colon == std::string_view::npos) reject();
    const auto epoch = parse_number(entry.substr(0, colon), 0);
    if (!steps_.emplace(epoch, parse_number(entry.substr(colon + 1), 1)).second) reject();
  }

  std::int64_t parse_number(std::string_view digits, std::int64_t minimum) const {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size()) reject();
    if (number < minimum || number > max_number) reject();
    return number;
  }

  [[noreturn]] void reject() const {
    throw std::invalid_argument(
        "--accumulate: must be a number of steps (4) or steps by epoch, from epoch 0 on and each epoch once "
        "(0:8,4:2), got '" +
        text_ + "'");
  }

  std::string text_;
  std::map<std::int64_t, std::int64_t> steps_;
};

}  // namespace fashion_mnist
