// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "encoded_reviews.hpp"
#include "model_folder.hpp"
#include "options.hpp"
#include "train.hpp"

namespace bloom {

struct Prediction {
  std::int64_t label = 0;
  double probability = 0;
};

/// In the order of the texts; the longest are scored first, with others of about their length.
inline std::vector<Prediction> predict(ModelFolder& folder, const std::vector<std::string>& texts,
                                       const Options& options) {
  std::vector<Review> reviews;
  for (const auto& text : texts) {
    if (text.empty()) throw std::invalid_argument("predict: a text must not be empty");
    reviews.push_back({text, 0});
  }
  const auto encoded = encode(folder.tokenizer, reviews, options.max_length, options.device);
  auto batches = encoded.test_batches(4 * options.max_length, folder.padding());
  const at::InferenceMode inference;
  folder.model->eval();
  std::vector<Prediction> predictions(texts.size());
  for (auto& batch : batches) {
    const auto [probabilities, labels] = objective(folder.model, batch).output.softmax(1).cpu().max(1);
    for (std::int64_t i = 0; i < batch.rows(); ++i)
      predictions[static_cast<std::size_t>(batch.indices[i].item<std::int64_t>())] = {labels[i].item<std::int64_t>(),
                                                                                      probabilities[i].item<double>()};
  }
  return predictions;
}

inline void print_predictions(const Options& options) {
  auto texts = options.texts;
  if (!options.file.empty()) {
    std::ifstream file(options.file);
    if (!file) throw std::runtime_error(options.file + ": must be a file that can be read");
    for (std::string line; std::getline(file, line);)
      if (!is_blank(line)) texts.push_back(line);
  }
  auto folder = open_model_folder(options.model, {}, options.device);
  const auto predictions = predict(folder, texts, options);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto [label, probability] = predictions[i];
    const auto name = folder.config.labels.empty() ? std::to_string(label) : folder.config.label_name(label);
    fmt::print("{} ({:.1f}%)  {}\n", name, 100 * probability, texts[i]);
  }
}

}  // namespace bloom
