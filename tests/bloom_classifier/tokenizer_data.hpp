// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/files.hpp"
#include "tokenizer/bloom_tokenizer.hpp"

namespace testing {

/// The files of tokenizer_values.py.
inline std::filesystem::path tokenizer_data(const std::string& name) {
  return std::filesystem::path(__FILE__).parent_path() / "data" / name;
}

inline nlohmann::json tokenizer_values(const std::string& name) {
  return nlohmann::json::parse(text_of(tokenizer_data(name)));
}

inline bloom::BloomTokenizer trained_tokenizer() {
  return bloom::BloomTokenizer::from_file(tokenizer_data("tokenizer.json"));
}

/// Makes a tokenizer from the content of a tokenizer.json.
inline bloom::BloomTokenizer tokenizer_of(const nlohmann::json& file) {
  return bloom::BloomTokenizer(bloom::TokenizerFileReader("tokenizer.json").parse(file.dump()));
}

/// Returns one of the files in tokenizer_kinds.json.
inline nlohmann::json tokenizer_kind(const std::string& name) {
  for (const auto& kind : tokenizer_values("tokenizer_kinds.json"))
    if (kind.at("name") == name) return kind.at("tokenizer");
  throw std::runtime_error("no kind " + name);
}

using Ids = std::vector<std::int64_t>;

struct Encoded {
  std::string text;
  Ids ids;
};

/// Returns texts with the ids of Python's tokenizers.
inline std::vector<Encoded> encoded_in_python(const nlohmann::json& rows) {
  std::vector<Encoded> texts;
  for (const auto& row : rows) texts.push_back({row.at(0), row.at(1)});
  return texts;
}

inline std::vector<Encoded> sample() { return encoded_in_python(tokenizer_values("tokenizer_ids.json").at("texts")); }

inline std::vector<std::string> texts_of(const std::vector<Encoded>& rows) {
  std::vector<std::string> texts;
  for (const auto& row : rows) texts.push_back(row.text);
  return texts;
}

}  // namespace testing
