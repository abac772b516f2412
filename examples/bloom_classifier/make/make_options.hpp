// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "data/made_up_names.hpp"
#include "model/config.hpp"
#include "tokenizer/tokenizer_file.hpp"

namespace bloom {

/// The numbers that determine the size of a BLOOM.
struct ModelSize {
  std::int64_t layers = 2, width = 64, heads = 4, words = 800;

  /// Returns the number of tokens. Some rows of the embeddings have none, as in BLOOM: 200 of 250,880.
  std::int64_t tokens() const { return std::min<std::int64_t>(words - words / 1254, TokenizerFileReader::max_tokens); }
  /// Returns the number of names in the reviews that the tokenizer is trained on.
  std::int64_t names() const { return std::min(words / 5, MadeUpNames::most); }

  /// Returns the configuration with BLOOM's other settings.
  BloomConfig config() const {
    return {.vocab_size = words, .hidden_size = width, .n_layer = layers, .n_head = heads, .pad_token_id = 3};
  }

  static ModelSize of(const std::string& name) {
    if (name == "tiny") return {};
    if (name == "560m") return {.layers = 24, .width = 1024, .heads = 16, .words = 250'880};
    throw std::invalid_argument("size must be tiny or 560m, got '" + name + "'");
  }
};

struct MakeOptions {
  ModelSize size = {};
  std::uint64_t seed = 123;
  std::uint64_t shard_bytes = 1'000'000'000;  // of a file's tensors; a larger tensor gets its own file
  std::int64_t reviews = 0;                   // in a CSV next to the model; 0: none
};

}  // namespace bloom
