// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace bloom {

using TokenId = std::int32_t;

/// The result of joining two neighboring tokens. Lower ranks come first; tokens that do not join have the rank `never`.
struct Merge {
  static constexpr std::int32_t never = std::numeric_limits<std::int32_t>::max();
  std::int32_t rank = never;
  TokenId result = -1;
};

/// The merges of a vocabulary by their two tokens: a hash table with open addressing, at most half full.
class MergeTable {
 public:
  explicit MergeTable(std::size_t capacity = 0) : slots_(std::bit_ceil(2 * capacity + 2)) {}

  /// Sets a merge. The number of different pairs must not exceed the capacity; a repeated pair is overwritten.
  void set(TokenId left, TokenId right, Merge merge) {
    auto& slot = slots_[place(left, right)];
    slot = {left, right, merge};
  }

  Merge find(TokenId left, TokenId right) const { return slots_[place(left, right)].merge; }

 private:
  struct Slot {
    TokenId left = -1, right = -1;
    Merge merge;
  };

  /// Returns the slot of the pair, or a free one for it.
  std::size_t place(TokenId left, TokenId right) const {
    const auto key = static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
    auto at = static_cast<std::size_t>((key * 0x9E3779B97F4A7C15u) >> 32);
    for (;; ++at) {
      at &= slots_.size() - 1;
      if (slots_[at].left == -1 || (slots_[at].left == left && slots_[at].right == right)) return at;
    }
  }

  std::vector<Slot> slots_;
};

/// Merges few tokens, by scanning all pairs for each merge.
inline void merge_short(std::vector<TokenId>& ids, const MergeTable& merges) {
  std::vector<Merge> joins(ids.size());  // joins[i]: the merge of ids[i] and ids[i + 1]
  const auto update = [&](std::size_t i) { joins[i] = i + 1 < ids.size() ? merges.find(ids[i], ids[i + 1]) : Merge(); };
  for (std::size_t i = 0; i < ids.size(); ++i) update(i);
  for (;;) {
    const auto best = std::min_element(joins.begin(), joins.end(), [](auto& a, auto& b) { return a.rank < b.rank; });
    if (best == joins.end() || best->rank == Merge::never) return;
    const auto i = best - joins.begin();
    ids[static_cast<std::size_t>(i)] = best->result;
    ids.erase(ids.begin() + i + 1);
    joins.erase(best + 1);
    update(static_cast<std::size_t>(i));
    if (i > 0) update(static_cast<std::size_t>(i) - 1);
  }
}

/// Merges many tokens in O(n log n), with a linked list of tokens and a queue of mergeable pairs.
inline void merge_long(std::vector<TokenId>& ids, const MergeTable& merges) {
  struct Token {
    TokenId id;
    std::size_t previous, next;
  };
  using Pair = std::pair<std::int32_t, std::size_t>;  // rank and left token: the leftmost of equal ranks first
  constexpr TokenId gone = -1;
  const auto count = ids.size();
  std::vector<Token> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = {ids[i], i - 1, i + 1};  // before 0: wraps beyond count

  const auto merge_at = [&](std::size_t left) {
    return left < count && tokens[left].next < count ? merges.find(tokens[left].id, tokens[tokens[left].next].id)
                                                     : Merge();
  };
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < count; ++i)
    if (const auto merge = merge_at(i); merge.rank != Merge::never) pairs.emplace_back(merge.rank, i);
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> queue(std::greater<>(), std::move(pairs));
  const auto consider = [&](std::size_t left) {
    if (const auto merge = merge_at(left); merge.rank != Merge::never) queue.emplace(merge.rank, left);
  };

  while (!queue.empty()) {
    const auto [rank, left] = queue.top();
    queue.pop();
    if (tokens[left].id == gone) continue;
    const auto merge = merge_at(left);
    if (merge.rank != rank) continue;  // outdated
    auto& right = tokens[tokens[left].next];
    right.id = gone;
    tokens[left].id = merge.result;
    tokens[left].next = right.next;
    if (right.next < count) tokens[right.next].previous = left;
    consider(tokens[left].previous);
    consider(left);
  }
  ids.clear();
  for (auto& token : tokens)
    if (token.id != gone) ids.push_back(token.id);
}

/// Joins neighbors until none can be joined: always the pair of the lowest rank, the leftmost of several.
inline void merge_pairs(std::vector<TokenId>& ids, const MergeTable& merges) {
  ids.size() <= 64 ? merge_short(ids, merges) : merge_long(ids, merges);
}

}  // namespace bloom
