// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bloom_tokenizer.hpp"
#include "parallel_for.hpp"

namespace bloom {

/// Returns the first `max_length` ids of each text, in the order of the texts.
inline std::vector<std::vector<std::int64_t>> encode_all(const BloomTokenizer& tokenizer,
                                                         std::span<const std::string> texts, std::size_t max_length,
                                                         int threads) {
  std::vector<std::vector<std::int64_t>> ids(texts.size());
  parallel_for(texts.size(), threads, [&](std::size_t i) { ids[i] = tokenizer.encode(texts[i], max_length); });
  return ids;
}

}  // namespace bloom
