// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "config_reader.hpp"
#include "data/text_file.hpp"
#include "json/json_reader.hpp"
#include "json/parse_json.hpp"

namespace bloom {

/// The shape of a BLOOM classifier: the names, the defaults and the config.json of transformers' BloomConfig.
struct BloomConfig {
  std::int64_t vocab_size = 250880;
  std::int64_t hidden_size = 64;
  std::int64_t n_layer = 2;
  std::int64_t n_head = 8;
  double layer_norm_epsilon = 1e-5;
  double initializer_range = 0.02;  // standard deviation of new weights
  double hidden_dropout = 0;
  double attention_dropout = 0;  // above 0 a CPU's attention takes memory for [n_head, t, t] in training
  bool apply_residual_connection_post_layernorm = false;
  std::optional<std::int64_t> pad_token_id = std::nullopt;
  std::int64_t num_labels = 2;
  std::vector<std::string> labels = {};  // their names; empty: LABEL_0, LABEL_1, ...

  std::int64_t head_dim() const { return hidden_size / n_head; }
  std::int64_t parameter_count() const {
    const auto block = (12 * hidden_size + 13) * hidden_size;
    return (vocab_size + 4 + num_labels) * hidden_size + n_layer * block;
  }

  std::string label_name(std::int64_t label) const {
    return labels.empty() ? "LABEL_" + std::to_string(label) : labels[static_cast<std::size_t>(label)];
  }

  /// @throws std::runtime_error that begins with `source` and names the requirement and the value.
  void check(const std::string& source = "BloomConfig") const;

  static BloomConfig from_json(const nlohmann::json& json, const std::string& source);
  static BloomConfig from_file(const std::filesystem::path& path);
  nlohmann::json to_json() const;
};

inline void BloomConfig::check(const std::string& source) const {
  const JsonReader reader(source);
  // 16 million tokens, a width of 65536: beyond any BLOOM (250880 and 14336), and small enough to multiply.
  reader.require_within(vocab_size, "vocab_size", 1, 1 << 24);
  reader.require_within(hidden_size, "hidden_size", 1, 1 << 16);
  reader.require_within(n_layer, "n_layer", 1, 1024);
  reader.require_within(n_head, "n_head", 1, hidden_size);
  if (hidden_size % n_head != 0)
    reader.fail("hidden_size must be divisible by n_head, got ", hidden_size, " and ", n_head);
  reader.require_within(num_labels, "num_labels", 2, 1 << 16);
  if (!labels.empty() && static_cast<std::int64_t>(labels.size()) != num_labels)
    reader.fail("labels must be as many as num_labels, ", num_labels, ", got ", labels.size());
  for (const auto& name : labels) reader.require_printable(name, "the name of a label");
  reader.require_within(layer_norm_epsilon, "layer_norm_epsilon", 1e-12, 1.0);
  reader.require_within(initializer_range, "initializer_range", 1e-12, 1.0);
  reader.require_within(hidden_dropout, "hidden_dropout", 0.0, 0.99);
  reader.require_within(attention_dropout, "attention_dropout", 0.0, 0.99);
  if (pad_token_id) reader.require_within(*pad_token_id, "pad_token_id", 0, vocab_size - 1);
  constexpr auto most_parameters = std::int64_t{1} << 38;  // the largest BLOOM has 1.8e11
  if (parameter_count() > most_parameters) reader.fail("must have at most 2^38 parameters, got ", parameter_count());
}

inline BloomConfig BloomConfig::from_json(const nlohmann::json& json, const std::string& source) {
  const JsonReader checks(source);
  const ConfigReader reader(json, checks);
  reader.require_text("model_type", "bloom");
  reader.require_text("problem_type", "single_label_classification", /*if_absent=*/true);
  BloomConfig config;
  reader.read(config.vocab_size, "vocab_size");
  reader.read(config.hidden_size, "hidden_size", "n_embed");
  reader.read(config.n_layer, "n_layer", "num_hidden_layers");
  reader.read(config.n_head, "n_head", "num_attention_heads");
  reader.read(config.layer_norm_epsilon, "layer_norm_epsilon");
  reader.read(config.initializer_range, "initializer_range");
  reader.read(config.hidden_dropout, "hidden_dropout");
  reader.read(config.attention_dropout, "attention_dropout");
  reader.read(config.apply_residual_connection_post_layernorm, "apply_residual_connection_post_layernorm");
  reader.read(config.pad_token_id, "pad_token_id");
  reader.read_labels(config.num_labels, config.labels);
  config.check(source);
  return config;
}

inline BloomConfig BloomConfig::from_file(const std::filesystem::path& path) {
  constexpr std::uint64_t most_bytes = 16 << 20;
  return from_json(parse_json(read_text_file(path, most_bytes), path.string()), path.string());
}

/// Writes JSON that transformers' BloomConfig.from_pretrained loads.
inline nlohmann::json BloomConfig::to_json() const {
  nlohmann::json json{
      {"architectures", {"BloomForSequenceClassification"}},
      {"model_type", "bloom"},
      {"vocab_size", vocab_size},
      {"hidden_size", hidden_size},
      {"n_layer", n_layer},
      {"n_head", n_head},
      {"layer_norm_epsilon", layer_norm_epsilon},
      {"initializer_range", initializer_range},
      {"hidden_dropout", hidden_dropout},
      {"attention_dropout", attention_dropout},
      {"apply_residual_connection_post_layernorm", apply_residual_connection_post_layernorm},
  };
  json["pad_token_id"] = pad_token_id ? nlohmann::json(*pad_token_id) : nlohmann::json();
  for (std::int64_t label = 0; label < num_labels; ++label) {
    json["id2label"][std::to_string(label)] = label_name(label);
    json["label2id"][label_name(label)] = label;
  }
  return json;
}

}  // namespace bloom
