// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "data/random.hpp"
#include "tokenizer/train_tokenizer.hpp"

namespace bloom {

/// Returns the ids from `begin` to `end` - 1, shuffled by the seed.
inline std::vector<std::int64_t> shuffled_ids(std::int64_t begin, std::int64_t end, std::uint64_t seed) {
  std::vector<std::int64_t> ids;
  for (auto id = begin; id < end; ++id) ids.push_back(id);
  Random(seed).shuffle(ids);
  return ids;
}

/// Makes a tokenizer.json with exactly `tokens` tokens. At most half of them are trained on the texts, but at least the
/// minimum. Their ids are spread over all ids, like the ids of one of BLOOM's many languages; the special ones are 0 to
/// 3, as in BLOOM. The rest are tokens that no text produces: no merge makes them, and none is a single byte.
inline nlohmann::json spread_tokenizer(std::span<const std::string> texts, std::int64_t tokens, std::uint64_t seed) {
  constexpr std::int64_t special = special_tokens.size(), least = special + 256;
  if (tokens < least)
    throw std::invalid_argument("spread_tokenizer: tokens must be at least " + std::to_string(least) +
                                ", the special ones and the bytes, got " + std::to_string(tokens));
  const auto trainer = detail::trained_pairs(texts, std::max(least, tokens / 2));
  const auto& trained = trainer.vocabulary();
  auto vocab = nlohmann::json::object();
  for (std::int64_t id = 0; id < special; ++id) vocab[trained.token(static_cast<TokenId>(id))] = id;
  auto next = static_cast<std::size_t>(special);
  for (const auto id : shuffled_ids(special, tokens, seed)) {
    // A text's token never contains a space: bytes are written as characters, and a space is Ġ.
    const auto token =
        next < trained.size() ? trained.token(static_cast<TokenId>(next)) : "unused " + std::to_string(id);
    vocab[token] = id;
    ++next;
  }
  return tokenizer_json(vocab, trainer.merges());
}

}  // namespace bloom
