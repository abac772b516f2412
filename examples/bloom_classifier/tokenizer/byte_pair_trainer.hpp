// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_alphabet.hpp"
#include "byte_pairs.hpp"
#include "splitter.hpp"
#include "utf8.hpp"
#include "vocabulary.hpp"

namespace bloom {

inline constexpr std::array<const char*, 4> special_tokens = {"<unk>", "<s>", "</s>", "<pad>"};  // ids 0 to 3, as BLOOM

/// Makes tokens from pieces by repeatedly joining the most frequent pair of neighboring tokens; ties go to the lowest
/// ids.
class BytePairTrainer {
 public:
  static constexpr std::size_t longest_piece = 4096;  // limits the length of tokens, which readers limit

  explicit BytePairTrainer(std::span<const std::string> texts) {
    for (const auto* token : special_tokens) vocabulary_.add(token);
    for (unsigned character = 0x21; character < 0x144; ++character)
      if (const auto byte = byte_of(character))
        ids_of_bytes_[static_cast<unsigned char>(*byte)] =
            vocabulary_.add(byte_characters()[static_cast<unsigned char>(*byte)]);
    std::map<std::string, std::int64_t> pieces;
    for (const auto& text : texts) count_pieces(to_utf8(text), pieces);
    for (const auto& [piece, count] : pieces) {
      words_.push_back({{}, count});
      for (const char byte : piece) words_.back().ids.push_back(ids_of_bytes_[static_cast<unsigned char>(byte)]);
      add_pairs(words_.size() - 1, count);
    }
    queue_changed();
  }

  /// Joins a pair. Returns false if no neighbors are left.
  bool join_most_frequent() {
    while (!queue_.empty()) {
      const auto [count, pair] = queue_.top();
      queue_.pop();
      const auto found = pairs_.find(pair);
      if (found == pairs_.end() || found->second.count != count) continue;  // outdated
      join(pair);
      return true;
    }
    return false;
  }

  const Vocabulary& vocabulary() const { return vocabulary_; }
  const nlohmann::json& merges() const { return merges_; }

 private:
  using Pair = std::pair<TokenId, TokenId>;
  struct Word {
    std::vector<TokenId> ids;
    std::int64_t count = 0;
  };
  struct PairUse {
    std::int64_t count = 0;
    std::vector<std::size_t> words;  // with the pair now or earlier
  };
  struct Candidate {
    std::int64_t count = 0;
    Pair pair;
    bool operator<(const Candidate& other) const {  // the greatest is joined next
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };

  static void count_pieces(std::string_view text, std::map<std::string, std::int64_t>& pieces) {
    while (!text.empty()) {
      const auto piece = next_piece(text);
      if (piece.size() <= longest_piece) ++pieces[std::string(piece)];
      text.remove_prefix(piece.size());
    }
  }

  /// Adds a word's pairs; a negative `count` removes them.
  void add_pairs(std::size_t word, std::int64_t count) {
    const auto& ids = words_[word].ids;
    for (std::size_t i = 1; i < ids.size(); ++i) {
      auto& use = pairs_[{ids[i - 1], ids[i]}];
      use.count += count;
      if (count > 0 && (use.words.empty() || use.words.back() != word)) use.words.push_back(word);
      changed_.push_back({ids[i - 1], ids[i]});
    }
  }

  void queue_changed() {
    std::sort(changed_.begin(), changed_.end());
    changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
    for (const auto& pair : changed_)
      if (const auto found = pairs_.find(pair); found->second.count > 0)
        queue_.push({found->second.count, pair});
      else
        pairs_.erase(found);
    changed_.clear();
  }

  void join(Pair pair) {
    const auto &left = vocabulary_.token(pair.first), &right = vocabulary_.token(pair.second);
    merges_.push_back({left, right});
    const auto known = vocabulary_.find(left + right);
    const auto result = known ? *known : vocabulary_.add(left + right);
    for (const auto at : std::exchange(pairs_.at(pair).words, {})) {
      auto& word = words_[at];
      if (!has_pair(word.ids, pair)) continue;
      add_pairs(at, -word.count);
      join(word.ids, pair, result);
      add_pairs(at, word.count);
    }
    queue_changed();
  }

  static bool has_pair(const std::vector<TokenId>& ids, Pair pair) {
    for (std::size_t i = 1; i < ids.size(); ++i)
      if (ids[i - 1] == pair.first && ids[i] == pair.second) return true;
    return false;
  }

  static void join(std::vector<TokenId>& ids, Pair pair, TokenId result) {
    std::size_t size = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const bool joins = i + 1 < ids.size() && ids[i] == pair.first && ids[i + 1] == pair.second;
      ids[size++] = joins ? result : ids[i];
      if (joins) ++i;
    }
    ids.resize(size);
  }

  Vocabulary vocabulary_;
  std::array<TokenId, 256> ids_of_bytes_{};
  std::vector<Word> words_;
  std::map<Pair, PairUse> pairs_;
  std::vector<Pair> changed_;  // since the last join
  std::priority_queue<Candidate> queue_;
  nlohmann::json merges_ = nlohmann::json::array();
};

}  // namespace bloom
