// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/io/save_sharded.hpp>
#include <string>
#include <utility>
#include <vector>

#include "model/config.hpp"
#include "normal_numbers.hpp"

namespace bloom {

/// Lists the weights of a BLOOM without a head, with the names and in the order of Hugging Face's files.
inline std::vector<gradaccum::io::PlannedTensor> planned_weights(const BloomConfig& config) {
  std::vector<gradaccum::io::PlannedTensor> all;
  const auto width = config.hidden_size;
  const auto add = [&](const std::string& module, std::vector<std::int64_t> weight) {
    const auto outputs = weight.front();
    all.push_back({.name = module + ".weight", .shape = std::move(weight)});
    all.push_back({.name = module + ".bias", .shape = {outputs}});
  };
  all.push_back({.name = "word_embeddings.weight", .shape = {config.vocab_size, width}});
  add("word_embeddings_layernorm", {width});
  for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
    const auto block = "h." + std::to_string(layer) + ".";
    add(block + "input_layernorm", {width});
    add(block + "self_attention.query_key_value", {3 * width, width});
    add(block + "self_attention.dense", {width, width});
    add(block + "post_attention_layernorm", {width});
    add(block + "mlp.dense_h_to_4h", {4 * width, width});
    add(block + "mlp.dense_4h_to_h", {width, 4 * width});
  }
  add("ln_f", {width});
  return all;
}

/// Initializes as BLOOM does: matrices normal, biases 0, normalizations 1.
inline at::Tensor initial_weight(const gradaccum::io::PlannedTensor& planned, double standard_deviation,
                                 std::uint64_t seed) {
  if (planned.shape.size() == 1) return torch::full(planned.shape, planned.name.ends_with(".weight") ? 1.0 : 0.0);
  auto weight = torch::empty(planned.shape);
  fill_with_normal(weight, standard_deviation, seed_of(planned.name, seed));
  return weight;
}

}  // namespace bloom
