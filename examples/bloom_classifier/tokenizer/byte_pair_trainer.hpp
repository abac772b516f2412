// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
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

/// Makes tokens of pieces by joining, again and again, the two neighbouring tokens that occur most often; of several
/// such pairs the one of the lowest ids.
class BytePairTrainer {
 public:
  static constexpr std::size_t longest_piece = 4096;  // longer ones could make tokens that are too long to be read

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
      add_pairs(words_.back(), count);
    }
  }

  /// False where no two neighbours are left.
  bool join_most_frequent() {
    const auto most_frequent =
        std::max_element(pair_counts_.begin(), pair_counts_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });  // the first of several
    if (most_frequent == pair_counts_.end()) return false;
    join(most_frequent->first);
    return true;
  }

  const Vocabulary& vocabulary() const { return vocabulary_; }
  const nlohmann::json& merges() const { return merges_; }

 private:
  using Pair = std::pair<TokenId, TokenId>;
  struct Word {
    std::vector<TokenId> ids;
    std::int64_t count = 0;
  };

  static void count_pieces(std::string_view text, std::map<std::string, std::int64_t>& pieces) {
    while (!text.empty()) {
      const auto piece = next_piece(text);
      if (piece.size() <= longest_piece) ++pieces[std::string(piece)];
      text.remove_prefix(piece.size());
    }
  }

  void add_pairs(const Word& word, std::int64_t count) {
    for (std::size_t i = 1; i < word.ids.size(); ++i) pair_counts_[{word.ids[i - 1], word.ids[i]}] += count;
  }

  void join(Pair pair) {
    const auto &left = vocabulary_.token(pair.first), &right = vocabulary_.token(pair.second);
    merges_.push_back({left, right});
    const auto known = vocabulary_.find(left + right);
    const auto result = known ? *known : vocabulary_.add(left + right);
    for (auto& word : words_) {
      if (!has_pair(word.ids, pair)) continue;
      add_pairs(word, -word.count);
      join(word.ids, pair, result);
      add_pairs(word, word.count);
    }
    std::erase_if(pair_counts_, [](const auto& counted) { return counted.second == 0; });
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
  std::map<Pair, std::int64_t> pair_counts_;
  nlohmann::json merges_ = nlohmann::json::array();
};

}  // namespace bloom
