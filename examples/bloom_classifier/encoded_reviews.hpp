// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/process_group.hpp>
#include <string>
#include <vector>

#include "data/reviews.hpp"
#include "tokenizer/encode_all.hpp"

namespace bloom {

namespace ga = gradaccum;

/// Reviews as inputs of a model: ids of any length, and labels.
struct EncodedReviews {
  std::vector<at::Tensor> ids;  // int64 [length]
  at::Tensor labels;            // int64 [n]
  std::int64_t tokens = 0, longest = 0;

  std::int64_t size() const { return labels.size(0); }

  /// Batches of reviews of similar length, to need little padding, in a new order each epoch. `multiple`: lengths are
  /// padded to a multiple of it, so that there are few shapes.
  ga::data::LengthBuckets training_batches(std::int64_t rows, std::int64_t padding, std::uint64_t seed,
                                           std::int64_t multiple = 1, const ga::ProcessGroup& group = {}) const {
    return {ids,
            labels,
            {.batch_size = rows,
             .shuffle = true,
             .seed = seed,
             .padding = padding,
             .pad_to_multiple_of = multiple,
             .rank = group.rank(),
             .world_size = group.world_size()}};
  }
  /// Batches of as many reviews as `most_tokens` padded tokens hold.
  ga::data::LengthBuckets test_batches(std::int64_t most_tokens, std::int64_t padding, std::int64_t multiple = 1,
                                       const ga::ProcessGroup& group = {}) const {
    return {ids,
            labels,
            {.tokens = std::max(most_tokens, (longest + multiple - 1) / multiple * multiple),
             .padding = padding,
             .pad_to_multiple_of = multiple,
             .rank = group.rank(),
             .world_size = group.world_size()}};
  }
  ga::data::LengthBuckets one_by_one() const { return {ids, labels, {.batch_size = 1}}; }
};

inline EncodedReviews encode(const BloomTokenizer& tokenizer, const std::vector<Review>& reviews,
                             std::int64_t max_length, const std::string& device) {
  std::vector<std::string> texts;
  std::vector<std::int64_t> labels;
  for (const auto& review : reviews) {
    texts.push_back(review.text);
    labels.push_back(review.label);
  }
  EncodedReviews encoded;
  for (const auto& ids : encode_all(tokenizer, texts, static_cast<std::size_t>(max_length), at::get_num_threads())) {
    encoded.ids.push_back(torch::tensor(ids, torch::kLong).to(device));
    encoded.tokens += static_cast<std::int64_t>(ids.size());
    encoded.longest = std::max(encoded.longest, static_cast<std::int64_t>(ids.size()));
  }
  encoded.labels = torch::tensor(labels, torch::kLong).to(device);
  return encoded;
}

}  // namespace bloom
