// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gradaccum/io/weights.hpp>
#include <optional>
#include <stdexcept>
#include <string>

#include "model/classifier.hpp"
#include "model/config.hpp"
#include "tokenizer/bloom_tokenizer.hpp"

namespace bloom {

/// A Hugging Face model folder in memory: the tokenizer and the model.
struct ModelFolder {
  std::filesystem::path path;
  BloomConfig config;
  BloomTokenizer tokenizer;
  BloomForSequenceClassification model = nullptr;

  std::int64_t padding() const { return *config.pad_token_id; }
};

namespace detail {

inline void check_fits(const BloomConfig& config, const BloomTokenizer& tokenizer, const std::filesystem::path& path) {
  if (tokenizer.vocabulary_size() > config.vocab_size)
    throw std::runtime_error(fmt::format("{}: vocab_size of config.json must be at least the tokenizer's {}, got {}",
                                         path.string(), tokenizer.vocabulary_size(), config.vocab_size));
}

inline void write_json(const std::filesystem::path& path, const nlohmann::json& json) {
  std::ofstream file(path);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) throw std::runtime_error(path.string() + ": must be written, and could not be");
}

}  // namespace detail

namespace detail {

/// Sets the dtype of new tensors for a scope.
class DefaultDtype {
 public:
  explicit DefaultDtype(torch::Dtype dtype) : before_(at::get_default_dtype()) { at::set_default_dtype(of(dtype)); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;
  ~DefaultDtype() { at::set_default_dtype(before_); }

 private:
  static caffe2::TypeMeta of(torch::Dtype dtype) { return c10::scalarTypeToTypeMeta(dtype); }

  caffe2::TypeMeta before_;
};

/// Creates the model directly in `dtype`, so that it never needs the memory of a wider one.
inline BloomForSequenceClassification new_model(const BloomConfig& config, torch::Dtype dtype) {
  const DefaultDtype scope(dtype);
  return BloomForSequenceClassification(config);
}

}  // namespace detail

/// Opens a folder. With `num_labels`, a missing classification head is created with random weights.
inline ModelFolder open_model_folder(const std::filesystem::path& path, std::optional<std::int64_t> num_labels,
                                     const std::string& device, torch::Dtype dtype = torch::kFloat) {
  auto config = BloomConfig::from_file(path / "config.json");
  auto tokenizer = BloomTokenizer::from_file(path / "tokenizer.json");
  detail::check_fits(config, tokenizer, path);
  if (!config.pad_token_id) config.pad_token_id = tokenizer.token_to_id("<pad>");
  if (!config.pad_token_id) throw std::runtime_error(path.string() + ": config.json must have a pad_token_id");
  if (num_labels && *num_labels != config.num_labels) {
    config.num_labels = *num_labels;
    config.labels.clear();
  }
  auto model = detail::new_model(config, dtype);
  gradaccum::io::LoadWeightsOptions options{.base_model_prefix = "transformer"};
  if (num_labels) options.may_be_missing = {"score"};
  gradaccum::io::load_weights(model, path, options);
  model->to(device);
  return {path, config, std::move(tokenizer), model};
}

/// Writes config.json, model.safetensors and tokenizer.json, which `transformers` loads.
inline void save_model_folder(ModelFolder& folder, const std::filesystem::path& path) {
  std::filesystem::create_directories(path);
  detail::write_json(path / "config.json", folder.config.to_json());
  gradaccum::io::save_weights(folder.model, path / "model.safetensors");
  for (const auto* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"})
    if (std::filesystem::exists(folder.path / name) && !std::filesystem::equivalent(folder.path, path))
      std::filesystem::copy_file(folder.path / name, path / name, std::filesystem::copy_options::overwrite_existing);
}

}  // namespace bloom
