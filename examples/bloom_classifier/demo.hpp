// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <stdlib.h>

#include "data/generated_reviews.hpp"
#include "data/split.hpp"
#include "data/write_csv.hpp"
#include "model_folder.hpp"
#include "options.hpp"
#include "run.hpp"
#include "tokenizer/train_tokenizer.hpp"

namespace bloom {

/// A new folder, which the destructor removes.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    auto name = (std::filesystem::temp_directory_path() / "bloom_classifier.XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error(name + ": must be a folder that can be created");
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Writes reviews, a tokenizer trained on them, and a small random model, in the formats that users have.
inline void make_demo_files(const std::filesystem::path& folder, std::int64_t count, std::uint64_t seed) {
  const auto reviews = generated_reviews(count, seed, {.length_scale = 0.2});
  std::filesystem::create_directories(folder);
  write_csv(folder / "reviews.csv", reviews);
  std::vector<std::string> texts;
  for (const auto& review : reviews) texts.push_back(review.text);
  const auto tokenizer = train_tokenizer(texts, 800);
  detail::write_json(folder / "tokenizer.json", tokenizer);
  torch::manual_seed(seed);
  BloomConfig config{.vocab_size = 800, .hidden_size = 64, .n_layer = 2, .n_head = 4, .pad_token_id = 3};
  detail::write_json(folder / "config.json", config.to_json());
  gradaccum::io::save_weights(BloomForSequenceClassification(config), folder / "model.safetensors");
}

/// Repeats a training with 1, 8 and 16 micro-batches per update; with 8 of them compiled, if the step was.
inline void demo(Options options) {
  const TemporaryFolder temporary;
  const auto compiled = options.compile;
  const auto folder = options.demo_files.empty() ? temporary.path() : std::filesystem::path(options.demo_files);
  make_demo_files(folder, options.demo_reviews, options.seed);
  options.model = folder;
  options.train = folder / "reviews.csv";
  options.learning_rate = 1e-3;  // high, because the model is untrained
  std::string table = fmt::format("{:>10} {:>10} {:>14} {:>10} {:>12}\n", "accumulate", "time", "test accuracy",
                                  "updates", "peak memory");
  if (!options.record_step.empty() || options.task == "causal-lm") {
    train(options);
    return;
  }
  const auto add_row = [&](std::int64_t steps, const std::string& compile) {
    options.accumulate = steps;
    options.compile = compile;
    fmt::print("\n==> {} micro-batch{} of one review an update{}\n", steps, steps == 1 ? "" : "es",
               compile.empty() ? "" : ", compiled");
    const auto trained = train(options);
    if (trained.report.signal != 0) return false;
    table += fmt::format("{:>10} {:>8.1f} s {:>13.2f}% {:>10} {:>9.1f} MB{}\n", steps, trained.report.seconds,
                         100 * trained.test["accuracy"], trained.report.updates,
                         static_cast<double>(trained.report.peak_bytes.at("cpu")) / (1 << 20),
                         compile.empty() ? "" : "  compiled");
    return true;
  };
  for (const std::int64_t steps : {1, 8, 16})
    if (!add_row(steps, "")) return;
  if (!compiled.empty() && !add_row(8, compiled)) return;
  fmt::print("\n{}", table);
}

}  // namespace bloom
