// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <gradaccum/autocast.hpp>
#include <gradaccum/process_group.hpp>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "make/make_options.hpp"

namespace bloom {

struct Options {
  // Selects one action.
  bool demo = false;
  bool make = false;
  bool predict = false;

  MakeOptions made;    // for `make`, and for --demo with --size
  std::string output;  // folder of `make`
  std::string size;    // of --demo; empty: a small model, trained in three ways
  std::int64_t demo_reviews = 12000;
  std::string demo_files;  // folder in which --demo keeps its files; empty: none

  std::string model;                    // a folder of Hugging Face's
  std::string train, validation, test;  // reviews; train alone is split
  std::vector<std::string> texts;       // to predict
  std::string file;                     // more texts to predict, one per line
  std::int64_t batch_tokens = 4096;     // scored together; 0: one text at a time

  std::int64_t max_length = 1024;
  std::int64_t micro_batch = 1;
  std::int64_t accumulate = 8;
  std::string task = "classification";
  std::int64_t epochs = 1;
  std::int64_t updates = 0;         // limit; 0: none
  double minutes = 0;               // limit; 0: none
  std::int64_t evaluate = 0;        // number of reviews of validation and test; 0: all
  std::int64_t validate_every = 0;  // updates; 0: only at the end of an epoch
  std::int64_t patience = 0;        // validations; 0: no limit
  double learning_rate = 5e-5;
  std::string optimizer = "adam";
  std::string precision = "32";
  std::int64_t segments = 0;            // 0: all activations are kept
  std::uint64_t memory_budget = 0;      // bytes of activations and gradients; 0: no budget
  std::int64_t pad_to_multiple_of = 0;  // 0: depends on the device
  std::string record_step, compile;     // folders; empty: neither
  bool graphs = true;
  std::string tensorboard, report, profile;  // a folder, a page, a folder; empty: none
  std::string save;                          // a folder; empty: nothing is saved
  std::int64_t save_every = 500;
  bool resume = false;
  std::int64_t log_every = 300;
  std::string device = torch::cuda::is_available() ? "cuda" : "cpu";
  int threads = 0;  // 0: LibTorch's default
  std::uint64_t seed = 123;
  gradaccum::ProcessGroup group = {};  // the processes that train together, each with its share of the reviews
  gradaccum::Shard shard = gradaccum::Shard::none;

  bool in_backward = false;

  bool mixed_precision() const { return precision.ends_with("-mixed"); }
  torch::Dtype parameter_type() const { return precision == "bf16-true" ? torch::kBFloat16 : torch::kFloat; }
  bool on_cpu() const { return at::Device(device).is_cpu(); }
  /// Returns whether steps are captured as CUDA graphs, which keep the memory that checkpoints, budgets and steps in
  /// backward would save.
  bool replays_graphs() const { return graphs && segments == 0 && memory_budget == 0 && !in_backward && !on_cpu(); }
  /// Returns whether the word embeddings' gradient is sparse, for an optimizer that updates only those rows.
  bool steps_by_rows() const {
    return on_cpu() && optimizer != "adafactor" && compile.empty() && group.world_size() == 1;
  }
  /// Returns the multiple to pad lengths to. On a GPU a product of a new shape takes 0.25 ms of host time.
  std::int64_t length_multiple() const {
    if (pad_to_multiple_of > 0) return pad_to_multiple_of;
    const bool few = !record_step.empty() || !compile.empty();  // each length is compiled separately
    return !on_cpu() ? 64 : few ? 16 : 1;
  }
  torch::Dtype autocast_type() const { return precision == "16-mixed" ? torch::kHalf : torch::kBFloat16; }
  std::optional<std::int64_t> most_updates() const { return updates > 0 ? std::optional(updates) : std::nullopt; }
  std::optional<std::chrono::duration<double>> most_time() const {
    return minutes > 0 ? std::optional(std::chrono::duration<double>(60 * minutes)) : std::nullopt;
  }
  std::optional<std::int64_t> validate_every_updates() const {
    return validate_every > 0 ? std::optional(validate_every) : std::nullopt;
  }
  std::string states() const { return save + "/states"; }
};

namespace detail {

inline void add_training(CLI::App& app, Options& options) {
  const auto data = "a CSV with columns text and label, or aclImdb's train or test folder";
  auto* train = app.add_option("--train", options.train, data);
  auto* validation = app.add_option("--validation", options.validation, "the same");
  auto* test = app.add_option("--test", options.test, "the same; without both, --train is split: 70, 10 and 20 %");
  validation->needs(train)->needs(test);
  test->needs(train)->needs(validation);
  app.add_option("--task", options.task, "causal-lm: pre-train, on each next word of the texts")
      ->check(CLI::IsMember({"classification", "causal-lm"}));
  app.add_option("--micro-batch", options.micro_batch, "reviews of one forward and backward pass")
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--accumulate", options.accumulate, "micro-batches that make one update")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--epochs", options.epochs, "passes over the training reviews")->check(CLI::Range(1, 1'000'000));
  app.add_option("--updates", options.updates, "stop after so many, if the epochs have more; 0: they decide")
      ->check(CLI::Range(0, 1'000'000'000));
  app.add_option("--minutes", options.minutes, "stop with the update in hand after so many; 0: the epochs decide")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--evaluate", options.evaluate, "reviews, of validation and of test each, that are scored; 0: all")
      ->check(CLI::Range(0, 1'000'000'000));
  app.add_option("--validate-every", options.validate_every,
                 "updates from validation to validation; 0: at the end of an epoch alone")
      ->check(CLI::Range(0, 1'000'000'000));
  app.add_option(
         "--patience", options.patience,
         "validations without a lower loss after which the training ends; --save keeps the best state, then; 0: "
         "the epochs decide")
      ->check(CLI::Range(0, 1'000'000'000));
  app.add_option("--tensorboard", options.tensorboard, "the folder for TensorBoard's curves of the training");
  app.add_option("--report", options.report, "a page of the training, .html, that is written while it goes on");
  app.add_option("--profile", options.profile, "the folder for where time and memory go in updates 4 to 6");
  app.add_option("--lr", options.learning_rate, "learning rate")->check(CLI::PositiveNumber);
  app.add_option("--optimizer", options.optimizer, "adafactor and adamw8bit take less memory")
      ->check(CLI::IsMember({"adam", "adamw", "adafactor", "adamw8bit"}));
  app.add_option(
         "--shard", options.shard,
         "what several processes divide: each keeps the optimizer's state of its own part of the parameters, or "
         "that and the gradients")
      ->transform(
          CLI::CheckedTransformer(std::map<std::string, gradaccum::Shard>{{"none", gradaccum::Shard::none},
                                                                          {"optimizer", gradaccum::Shard::optimizer},
                                                                          {"gradients", gradaccum::Shard::gradients}}));
  app.add_flag("--in-backward", options.in_backward,
               "step each parameter as soon as its gradient is there, and free that: for updates of one micro-batch");
  auto* segments = app.add_option("--checkpoint", options.segments,
                                  "segments of blocks that run again in backward, for less memory; 0: none")
                       ->check(CLI::Range(0, 1024));
  app.add_option("--memory-budget", options.memory_budget,
                 "bytes that activations and gradients may take (512MB): the reviews of an update, --micro-batch times "
                 "--accumulate, go in parts that fit")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->excludes(segments);
  app.add_option(
         "--pad-to-multiple-of", options.pad_to_multiple_of,
         "lengths are padded to a multiple of this: a few lengths can be compiled, and a GPU meets few shapes; 0: 1 "
         "on a CPU, 16 if it is compiled, 64 elsewhere")
      ->check(CLI::Range(0, 1 << 16));
  app.add_option("--record-step", options.record_step,
                 "record the training step in this folder, for gradaccum-compile-step, and train nothing");
  app.add_option("--compile", options.compile,
                 "train with the step that was recorded and compiled in this folder; "
                 "--demo sets it beside the others")
      ->excludes("--record-step")
      ->excludes(segments)
      ->excludes("--memory-budget");
  app.add_flag("--no-graphs{false}", options.graphs,
               "launch each kernel of a step from the host; else a GPU replays steps as CUDA graphs");
  auto* save = app.add_option("--save", options.save, "the folder for the trained model, and for states on the way");
  app.add_option("--save-every", options.save_every, "updates from state to state")
      ->needs(save)
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_flag("--resume", options.resume, "go on from the newest state in the folder of --save")->needs(save);
  app.add_option("--log-every", options.log_every, "batches from line to line")->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--seed", options.seed, "of the split, of new weights and of the order")
      ->check(CLI::Range(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max() / 2));
}

inline const CLI::IsMember size_names({"tiny", "560m"});

inline void add_demo(CLI::App& app, Options& options) {
  auto* demo = app.add_flag("--demo", options.demo,
                            "make a small model and reviews, and train with 1, 8 and 16 micro-batches an update");
  app.add_option("--demo-reviews", options.demo_reviews, "how many it makes")
      ->needs(demo)
      ->check(CLI::Range(10, 1 << 20));
  app.add_option("--demo-files", options.demo_files,
                 "keep its files in this folder, to go on with them by hand; with --size they are used again")
      ->needs(demo);
  app.add_option("--size", options.size,
                 "of the demo's model: make what `make` makes, train it for some minutes, and say what that takes")
      ->needs(demo)
      ->check(size_names);
}

/// Adds an option for one number of a ModelSize, which overrides --size.
inline void add_number(CLI::App& make, const std::string& name, const std::string& what, std::int64_t least,
                       std::int64_t most, std::int64_t& number) {
  make.add_option_function<std::int64_t>(
          name, [&number](const std::int64_t& given) { number = given; }, what)
      ->check(CLI::Range(least, most));
}

inline void add_make(CLI::App& app, Options& options) {
  auto& make = *app.add_subcommand("make", "a model that has learned nothing, in a folder as Hugging Face has them");
  auto& size = options.made.size;
  make.add_option_function<std::string>(
          "--size", [&size](const std::string& name) { size = ModelSize::of(name); },
          "what --layers, --width, --heads and --words are where they are not given: of tiny 2, 64, 4 and 800, "
          "of 560m BLOOM's 24, 1024, 16 and 250880")
      ->check(size_names)
      ->default_str("tiny")
      ->trigger_on_parse();  // before the options that override it
  add_number(make, "--layers", "blocks", 1, 1024, size.layers);
  add_number(make, "--width", "numbers of a token's hidden state", 1, 1 << 16, size.width);
  add_number(make, "--heads", "of attention; they must divide the width", 1, 1 << 16, size.heads);
  add_number(make, "--words", "rows of the table of words", 260, 1 << 24, size.words);
  make.add_option("--output", options.output, "the folder, which must not exist yet")->required();
  make.add_option("--seed", options.made.seed, "of the weights, the words and the reviews");
  make.add_option("--shard-size", options.made.shard_bytes,
                  "most bytes of a file of weights (500MB), but for a larger tensor")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(CLI::PositiveNumber);
  make.add_option("--reviews", options.made.reviews, "generated reviews in its reviews.csv, to train on; 0: none")
      ->check(CLI::Range(0, 1 << 20));
  make.callback([&options] { options.make = true; });
}

inline void add_model(CLI::App& app, Options& options) {
  app.add_option("--model", options.model,
                 "a folder as Hugging Face has them: config.json, tokenizer.json, *.safetensors");
  app.add_option("--max-length", options.max_length, "tokens that are kept of a review")->check(CLI::Range(1, 1 << 20));
  app.add_option("--precision", options.precision,
                 "mixed: 16 bits where they do no harm; bf16-true: the weights, too, rounded stochastically")
      ->check(CLI::IsMember({"32", "bf16-mixed", "16-mixed", "bf16-true"}));
  app.add_option("--device", options.device, "cpu, cuda or cuda:N");
  app.add_option("--threads", options.threads, "processor threads; 0: LibTorch chooses")->check(CLI::Range(0, 1024));
}

/// Sets the defaults of --demo with --size: the cheapest settings on this machine.
inline void set_defaults_of_size(const CLI::App& app, Options& options) {
  if (options.size.empty()) return;
  const auto is_given = [&](const char* name) { return app.count(name) > 0; };
  options.made.size = ModelSize::of(options.size);
  options.made.seed = options.seed;
  options.made.reviews = is_given("--demo-reviews") ? options.demo_reviews : 2000;
  if (!is_given("--minutes") && !is_given("--updates")) options.minutes = 4;
  if (!is_given("--evaluate")) options.evaluate = 8;
  if (!is_given("--log-every")) options.log_every = 40;
  if (!is_given("--micro-batch") && !is_given("--accumulate")) {
    options.micro_batch = 2;  // reads the weights half as often as 1
    options.accumulate = 4;
  }
  if (!is_given("--optimizer") && options.on_cpu()) options.optimizer = "adamw8bit";  // a GPU needs kernels for it
  if (!is_given("--precision") && gradaccum::is_bf16_fast(options.device)) options.precision = "bf16-mixed";
}

inline void add_options(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_demo(app, options);
  add_model(app, options);
  add_training(app, options);
  add_make(app, options);
  auto* predict = app.add_subcommand("predict", "the label of each text, and how likely it is");
  predict->add_option("texts", options.texts, "texts");
  predict->add_option("--file", options.file, "a CSV (*.csv) with a column text; any other file has a text a line");
  predict->add_option("--batch-tokens", options.batch_tokens, "tokens that are scored together; 0: a text at a time")
      ->check(CLI::Range(0, 1 << 24));
  add_model(*predict, options);
  predict->callback([&options] { options.predict = true; });
}

inline void check_together(const Options& options) {
  if (options.task == "causal-lm" &&
      (options.in_backward || options.memory_budget > 0 || !options.record_step.empty() || !options.compile.empty() ||
       !options.profile.empty()))
    throw std::invalid_argument(
        "--task causal-lm: leave out --in-backward, --memory-budget, --record-step, --compile and --profile");
  if (options.demo || options.make) return;
  if (options.model.empty()) throw std::invalid_argument("--model must be given, or make or --demo");
  if (!options.predict && options.train.empty()) throw std::invalid_argument("--train must be given, or predict");
  if (options.predict && options.texts.empty() && options.file.empty())
    throw std::invalid_argument("predict: texts or --file must be given");
}

}  // namespace detail

/// Parses the command line. Ends the program after --help (status 0) or a mistake (one line, status 2).
inline Options parse_options(int argc, char** argv) {
  Options options;
  CLI::App app("Fine-tunes a BLOOM of Hugging Face's on texts with labels.", "bloom_classifier");
  detail::add_options(app, options);
  try {
    app.parse(argc, argv);
    detail::check_together(options);
    detail::set_defaults_of_size(app, options);
    return options;
  } catch (const CLI::Success& request) {
    std::exit(app.exit(request));
  } catch (const std::exception& mistake) {
    fmt::print(stderr, "bloom_classifier: {}\n", mistake.what());
    std::exit(2);
  }
}

}  // namespace bloom
