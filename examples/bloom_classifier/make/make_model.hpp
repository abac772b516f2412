// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <gradaccum/io/save_sharded.hpp>
#include <gradaccum/progress_line.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "data/generated_reviews.hpp"
#include "data/write_csv.hpp"
#include "initial_weights.hpp"
#include "make_options.hpp"
#include "model_folder.hpp"
#include "new_folder.hpp"
#include "spread_tokenizer.hpp"

namespace bloom {

namespace detail {

/// Generates reviews of IMDB's lengths in tokens; a rare name is several tokens.
inline std::vector<Review> made_reviews(const MakeOptions& options, std::int64_t count, std::uint64_t seed) {
  return generated_reviews(count, seed, {.length_scale = 0.84, .names = options.size.names()});
}

/// Trains the tokenizer on reviews of another seed than the written ones, so that it has not seen all of their words.
inline void make_tokenizer(const MakeOptions& options, const std::filesystem::path& folder) {
  const auto count = std::clamp<std::int64_t>(options.size.words / 40, 200, 20'000);
  std::vector<std::string> texts;
  for (auto& review : made_reviews(options, count, options.seed + 1)) texts.push_back(std::move(review.text));
  write_json(folder / "tokenizer.json", spread_tokenizer(texts, options.size.tokens(), options.seed));
}

/// Writes one tensor after another, so that only one is in memory.
inline void make_weights(const MakeOptions& options, const BloomConfig& config, const std::filesystem::path& folder) {
  const auto planned = planned_weights(config);
  const auto all = static_cast<double>(config.parameter_count()) * 4;
  std::int64_t bytes = 0;
  gradaccum::ProgressLine progress({.unit = "MB"});
  const auto make = [&](const gradaccum::io::PlannedTensor& tensor) {
    progress.update(static_cast<double>(bytes) / all, bytes / 1'000'000, [&] { return tensor.name; });
    bytes += c10::multiply_integers(tensor.shape) * 4;
    return initial_weight(tensor, config.initializer_range, options.seed);
  };
  gradaccum::io::save_sharded(planned, folder, make, {.shard_bytes = options.shard_bytes});
}

}  // namespace detail

/// Makes a Hugging Face folder of an untrained BLOOM: config.json, tokenizer.json, and random weights in shards. The
/// bytes depend only on the options and the seed. Needs the memory of the largest tensor.
///
///     bloom::make_model({.size = bloom::ModelSize::of("560m")}, "bloom-560m");
///
/// @throws std::runtime_error if the folder exists or cannot be written.
inline void make_model(const MakeOptions& options, const std::filesystem::path& path) {
  const auto config = options.size.config();
  config.check("make");
  NewFolder folder(path);
  const auto& partial = folder.partial();
  auto json = config.to_json();
  json["architectures"] = {"BloomModel"};  // without a head: training sets the number of labels
  for (const auto* name : {"id2label", "label2id"}) json.erase(name);
  json.update({{"bos_token_id", 1}, {"eos_token_id", 2}, {"unk_token_id", 0}, {"dtype", "float32"}});
  detail::write_json(partial / "config.json", json);
  detail::make_tokenizer(options, partial);
  detail::make_weights(options, config, partial);
  if (options.reviews > 0)
    write_csv(partial / "reviews.csv", detail::made_reviews(options, options.reviews, options.seed));
  folder.finish();
}

}  // namespace bloom
