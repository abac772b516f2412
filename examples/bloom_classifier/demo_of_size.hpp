// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>

#include "demo.hpp"
#include "make/make_model.hpp"
#include "options.hpp"
#include "run.hpp"

namespace bloom {

/// Makes a model's folder, and prints its number of parameters.
inline void make_and_tell(const MakeOptions& options, const std::filesystem::path& path) {
  const auto start = std::chrono::steady_clock::now();
  make_model(options, path);
  auto config = options.size.config();
  config.num_labels = 0;  // no classification head
  fmt::print("Made {}: {} parameters, in {:.1f} s\n", path.string(), config.parameter_count(),
             std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

inline void make(const Options& options) { make_and_tell(options.made, options.output); }

namespace detail {

/// Reuses an existing folder if its model has that size.
inline void make_unless_there(const MakeOptions& options, const std::filesystem::path& path) {
  if (!std::filesystem::exists(path / "config.json")) return make_and_tell(options, path);
  const auto found = BloomConfig::from_file(path / "config.json").parameter_count(),
             wanted = options.size.config().parameter_count();
  if (found != wanted)
    throw std::runtime_error(fmt::format("{}: must be of the size of --size, {} parameters, got {}: remove it",
                                         path.string(), wanted, found));
  fmt::print("{} is there already\n", path.string());
}

/// Formats as `1.3 hours`.
inline std::string hours_text(double seconds) { return fmt::format("{:.3g} hours", seconds / 3600); }

inline void print_projection(const Trained& trained) {
  constexpr double imdb = 35'000;  // 70 % of its reviews
  const auto samples = static_cast<double>(trained.report.samples);
  const auto tokens = static_cast<double>(trained.tokens);
  fmt::print("\n{:.0f} tokens a review, {} tokens/second in training: an epoch of {:.0f} reviews takes {}\n",
             tokens / samples, ga::rate_text(tokens / trained.training_seconds), imdb,
             hours_text(trained.training_seconds * imdb / samples));
  const auto tensors = static_cast<double>(trained.peak_bytes);
  const auto resident = static_cast<double>(trained.report.peak_resident_bytes);
  fmt::print("At most {:.0f} bytes of tensors, weights included; resident {:.0f} bytes, {:.2f} times as many\n",
             tensors, resident, resident / tensors);
}

}  // namespace detail

/// Makes a model of a size, trains it for some minutes, and prints the time that a whole training would take.
inline void demo_of_size(Options options) {
  std::optional<TemporaryFolder> temporary;
  if (options.demo_files.empty()) temporary.emplace();
  const auto folder = temporary ? temporary->path() / "model" : std::filesystem::path(options.demo_files);
  detail::make_unless_there(options.made, folder);
  options.model = folder;
  options.train = folder / "reviews.csv";
  fmt::print("Training with {} in {}, {} reviews an update\n", options.optimizer,
             options.mixed_precision() ? options.precision : "float32", options.micro_batch * options.accumulate);
  std::fflush(stdout);
  const auto trained = train(options);
  if (trained.report.signal == 0 && trained.report.updates > 0) detail::print_projection(trained);
}

}  // namespace bloom
