// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <gradaccum/autocast.hpp>
#include <gradaccum/progress_line.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "data/read_csv.hpp"
#include "encoded_reviews.hpp"
#include "model_folder.hpp"
#include "options.hpp"
#include "train.hpp"

namespace bloom {

struct Prediction {
  std::int64_t label = 0;
  double probability = 0;
};

/// Returns predictions in the order of the texts. Scores the longest first, in batches of similar length.
inline std::vector<Prediction> predict(ModelFolder& folder, const std::vector<std::string>& texts,
                                       const Options& options) {
  std::vector<Review> reviews;
  for (const auto& text : texts) {
    if (text.empty()) throw std::invalid_argument("predict: a text must not be empty");
    reviews.push_back({text, 0});
  }
  const auto encoded = encode(folder.tokenizer, reviews, options.max_length, options.device);
  auto batches = options.batch_tokens == 0
                     ? encoded.one_by_one()
                     : encoded.test_batches(options.batch_tokens, folder.padding(), options.length_multiple());
  const at::InferenceMode inference;
  const ga::Autocast autocast(options.device, options.autocast_type(), options.mixed_precision());
  folder.model->eval();
  std::vector<Prediction> predictions(texts.size());
  ga::ProgressLine progress({.only_on_terminal = true, .unit = "texts"});
  std::int64_t done = 0;
  for (auto& batch : batches) {
    const auto [probabilities, labels] = objective(folder.model, batch).output.softmax(1).cpu().max(1);
    for (std::int64_t i = 0; i < batch.rows(); ++i)
      predictions[static_cast<std::size_t>(batch.indices[i].item<std::int64_t>())] = {labels[i].item<std::int64_t>(),
                                                                                      probabilities[i].item<double>()};
    done += batch.rows();
    progress.update(static_cast<double>(done) / static_cast<double>(texts.size()), done, [] { return "predict"; });
  }
  return predictions;
}

/// Reads the text column of a CSV file, or the lines of any other file, without blank ones.
inline std::vector<std::string> read_texts(const std::filesystem::path& path) {
  std::vector<std::string> texts;
  if (path.extension() == ".csv") {
    for (auto& review : read_csv(path, {}, Columns::text).rows) texts.push_back(std::move(review.text));
    return texts;
  }
  std::istringstream lines(read_text_file(path, CsvLimits().file_bytes));
  for (std::string line; std::getline(lines, line);)
    if (!is_blank(line)) texts.push_back(line);
  return texts;
}

inline void print_predictions(const Options& options) {
  auto texts = options.texts;
  if (!options.file.empty())
    for (auto& text : read_texts(options.file)) texts.push_back(std::move(text));
  auto folder = open_model_folder(options.model, {}, options.device, options.parameter_type());
  const auto start = std::chrono::steady_clock::now();
  const auto predictions = predict(folder, texts, options);
  const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto [label, probability] = predictions[i];
    const auto name = folder.config.labels.empty() ? std::to_string(label) : folder.config.label_name(label);
    fmt::print("{} ({:.1f}%)  {}\n", name, 100 * probability, texts[i]);
  }
  if (!options.file.empty())
    fmt::print(stderr, "Texts/second: {}\n", ga::rate_text(static_cast<double>(texts.size()) / seconds));
}

}  // namespace bloom
