// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>

#include "byte_pair_trainer.hpp"
#include "tokenizer_file.hpp"
#include "tokenizer_kind.hpp"

namespace bloom {

/// Makes a tokenizer.json of BLOOM's kind from the ids of tokens and the merges.
inline nlohmann::json tokenizer_json(const nlohmann::json& vocab, const nlohmann::json& merges) {
  using Json = nlohmann::json;
  auto added_tokens = Json::array();
  for (std::size_t id = 0; id < special_tokens.size(); ++id) {
    Json token = {{"id", id}, {"content", special_tokens[id]}, {"special", true}};
    for (const auto* name : {"single_word", "lstrip", "rstrip", "normalized"}) token[name] = false;
    added_tokens.push_back(token);
  }
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}, {"use_regex", false}};
  Json model = {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}};
  for (const auto* name : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
    model[name] = nullptr;
  for (const auto* name : {"fuse_unk", "byte_fallback", "ignore_merges"}) model[name] = false;
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added_tokens},
          {"normalizer", nullptr},
          {"pre_tokenizer", bloom_pre_tokenizer()},
          {"post_processor", byte_level},
          {"decoder", byte_level},
          {"model", model}};
}

namespace detail {

/// Returns a trainer with at most `vocabulary_size` tokens.
inline BytePairTrainer trained_pairs(std::span<const std::string> texts, std::int64_t vocabulary_size) {
  constexpr std::int64_t smallest = special_tokens.size() + 256, largest = TokenizerFileReader::max_tokens;
  if (vocabulary_size < smallest || vocabulary_size > largest)
    throw std::invalid_argument("train_tokenizer: vocabulary_size must be at least " + std::to_string(smallest) +
                                ", the special tokens and the bytes, and at most " + std::to_string(largest) +
                                ", got " + std::to_string(vocabulary_size));
  BytePairTrainer trainer(texts);
  while (static_cast<std::int64_t>(trainer.vocabulary().size()) < vocabulary_size)
    if (!trainer.join_most_frequent()) break;
  return trainer;
}

}  // namespace detail

/// Trains a tokenizer.json of BLOOM's kind with at most `vocabulary_size` tokens; fewer if the texts yield no more.
inline nlohmann::json train_tokenizer(std::span<const std::string> texts, std::int64_t vocabulary_size) {
  const auto trainer = detail::trained_pairs(texts, vocabulary_size);
  auto vocab = nlohmann::json::object();
  for (std::size_t id = 0; id < trainer.vocabulary().size(); ++id)
    vocab[trainer.vocabulary().token(static_cast<TokenId>(id))] = id;
  return tokenizer_json(vocab, trainer.merges());
}

}  // namespace bloom
