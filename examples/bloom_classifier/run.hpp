// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "encoded_reviews.hpp"
#include "language_model.hpp"
#include "model_folder.hpp"
#include "objective.hpp"
#include "options.hpp"
#include "read_reviews.hpp"
#include "train.hpp"

namespace bloom {

inline void print_summary(const Trained& trained, const ReviewSplit& reviews, const Options& options) {
  std::ostringstream report;
  report << trained.report;
  if (options.task == "causal-lm") {
    fmt::print("Test perplexity {:.2f}\n\n{}", std::exp(trained.test["loss"]), report.str());
    return;
  }
  const auto tokens = static_cast<double>(trained.tokens), padded = static_cast<double>(trained.padded);
  fmt::print("Test accuracy {:.2f}%\n\n{}", 100 * trained.test["accuracy"], report.str());
  if (trained.peak_bytes > 0)
    fmt::print("Peak tensor memory, weights included: {:.2f} MB\n",
               static_cast<double>(trained.peak_bytes) / static_cast<double>(ga::MiB));
  fmt::print("Tokens/second: {}\nPadding: {:.1f}%\nReviews without text, left out: {}\n",
             ga::rate_text(tokens / trained.report.seconds), padded > 0 ? 100 * (1 - tokens / padded) : 0.0,
             reviews.skipped);
}

/// Returns `count` evenly spaced reviews; 0: all.
inline std::vector<Review> some_of(std::vector<Review> reviews, std::int64_t count) {
  const auto size = static_cast<std::int64_t>(reviews.size());
  if (count == 0 || count >= size) return reviews;
  std::vector<Review> some;
  for (std::int64_t i = 0; i < count; ++i)
    some.push_back(std::move(reviews[static_cast<std::size_t>(i * size / count)]));
  return some;
}

/// Reads and encodes reviews, trains, prints results, and saves.
inline Trained train(const Options& options) {
  std::optional<ga::MemoryMeter> meter;  // not with LibTorch's profiler, which uses the same hook
  if (options.profile.empty()) meter.emplace();
  const auto reviews = read_reviews(options);
  torch::manual_seed(options.seed);
  auto folder = open_model_folder(options.model, reviews.num_labels, options.device, options.parameter_type());
  fmt::print("Tokenizer input max length: {}\nTokenizer vocabulary size: {}\n", options.max_length,
             folder.tokenizer.vocabulary_size());
  const auto encoded = [&](const auto& rows) {
    return encode(folder.tokenizer, rows, options.max_length, options.device);
  };
  const EncodedSplit ids{encoded(reviews.rows.train), encoded(some_of(reviews.rows.validation, options.evaluate)),
                         encoded(some_of(reviews.rows.test, options.evaluate))};
  if (!options.record_step.empty()) {
    record_step(folder, ids.train, options);
    return {};
  }
  auto trained = options.task == "causal-lm" ? fit_language_model(folder, ids, options) : fit(folder, ids, options);
  trained.peak_bytes = meter ? meter->peak_bytes() : 0;
  if (const int signal = trained.report.signal; signal != 0) {
    fmt::print("Stopped by {} and saved in {}: with --resume the training goes on from there\n",
               signal == SIGINT ? "SIGINT" : "SIGTERM", options.states());
    return trained;
  }
  print_summary(trained, reviews, options);
  if (!options.save.empty() && options.group.rank() == 0) {
    save_model_folder(folder, options.save);
    fmt::print("Saved in {}\n", options.save);
  }
  return trained;
}

}  // namespace bloom
