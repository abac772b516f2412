// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace exported_model {

struct Options {
  std::string model, data;
  std::string validation;  // a file; empty: no validation
  std::int64_t epochs = 3;
  std::int64_t batch_size = 16;
  std::int64_t accumulate = 1;
  double learning_rate = 5e-5;
  double clip = 1.0;
  std::string save;  // a folder; empty: no states
  bool resume = false;
  std::string report, output;  // a page, a folder; empty: none
};

namespace detail {

inline void add_options(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--model", options.model, "what gradaccum-export wrote")->required()->type_name("FOLDER");
  app.add_option("--data", options.data, "tensors by the names that the model takes: input_ids, attention_mask, labels")
      ->required()
      ->type_name("FILE.safetensors");
  app.add_option("--validation", options.validation, "the same, to validate with before the training and each epoch")
      ->type_name("FILE.safetensors");
  app.add_option("--epochs", options.epochs, "passes over the data")->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch-size", options.batch_size, "rows of one forward and backward pass")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--accumulate", options.accumulate, "batches that make one update")->check(CLI::Range(1, 1 << 20));
  app.add_option("--learning-rate", options.learning_rate, "after the warm-up, from where it falls to 0")
      ->check(CLI::PositiveNumber);
  app.add_option("--clip", options.clip, "the largest norm of an update's gradient")->check(CLI::PositiveNumber);
  auto* save = app.add_option("--save", options.save, "save states in this folder, also when SIGINT or SIGTERM comes");
  save->type_name("FOLDER");
  app.add_flag("--resume", options.resume, "go on from the newest state in the folder of --save, if it has one")
      ->needs(save);
  app.add_option("--report", options.report, "a page of the training, which is written on the way")
      ->type_name("FILE.html");
  app.add_option("--output", options.output, "the folder for the trained weights, as from_pretrained() reads them")
      ->type_name("FOLDER");
}

/// Refuses before the training an --output that save_weights would refuse after it.
inline void check_together(const Options& options) {
  if (!options.output.empty() && std::filesystem::exists(std::filesystem::path(options.output) / "manifest.json"))
    throw std::invalid_argument(
        fmt::format("--output: must not be the folder of an exported model, whose files it would overwrite, got '{}'",
                    options.output));
}

}  // namespace detail

/// Parses the command line. Ends the program after --help (status 0) or a mistake (one line, status 2).
inline Options parse_options(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a model that Python exported, without Python.", "exported_model");
  detail::add_options(app, options);
  try {
    app.parse(argc, argv);
    detail::check_together(options);
    return options;
  } catch (const CLI::Success& request) {
    std::exit(app.exit(request));
  } catch (const std::exception& mistake) {
    fmt::print(stderr, "exported_model: {}\n", mistake.what());
    std::exit(2);
  }
}

}  // namespace exported_model
