// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/process_group.hpp>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "accumulation_schedule.hpp"
#include "checkpoint_choice.hpp"
#include "model.hpp"

namespace fashion_mnist {

inline constexpr std::int64_t compared_steps = 4;  // --compare compares a batch of B to B/4 over 4 steps

struct Options {
  std::int64_t depth = 2;
  std::int64_t batch_size = 64;
  AccumulationSchedule accumulate;
  std::int64_t epochs = 20;
  double learning_rate = 1e-3;
  std::string optimizer = "sgd";
  std::string device = torch::cuda::is_available() ? "cuda" : "cpu";
  std::string dtype = "float32";
  std::string amp = "off";
  int threads = 0;  // 0: LibTorch's default
  std::uint64_t seed = 0;
  std::string data = "/usr/share/datasets/fashion-mnist";
  bool trainer = false;
  std::string save = {};  // a directory; empty: nothing is saved
  std::int64_t save_every = 500;
  std::int64_t keep_last = 3;
  bool resume = false;
  std::int64_t validate_every = 0;           // updates; 0: only at the end of an epoch
  std::int64_t patience = 0;                 // validations; 0: no limit
  std::string tensorboard, report, profile;  // a directory, a page, a directory; empty: none
  std::optional<ga::CheckpointedSequentialOptions> checkpoint = {};
  std::string record_step = {};  // directories; empty: neither
  std::string compile = {};
  bool graphs = true;
  std::int64_t memory_budget = 0;     // bytes; 0: none
  ga::Shard shard = ga::Shard::none;  // the state that ranks divide
  bool compare = false;
  bool compare_micro_batches = false;

  torch::Dtype scalar_type() const { return dtype == "float64" ? torch::kFloat64 : torch::kFloat32; }
  bool mixed_precision() const { return amp != "off"; }
  /// Returns whether steps are captured as CUDA graphs, which keep the memory that checkpoints and budgets would save.
  bool replays_graphs() const { return graphs && !checkpoint && memory_budget == 0 && !at::Device(device).is_cpu(); }
  bool needs_trainer() const {
    return !save.empty() || validate_every > 0 || patience > 0 || !tensorboard.empty() || !report.empty() ||
           !profile.empty();
  }
  std::optional<std::int64_t> validate_every_updates() const {
    return validate_every > 0 ? std::optional(validate_every) : std::nullopt;
  }
  torch::Dtype autocast_type() const { return amp == "fp16" ? torch::kHalf : torch::kBFloat16; }
  bool scales_loss() const { return amp == "fp16"; }  // bfloat16 has the range of float32
};

namespace detail {

// Validators for CLI11: each returns an empty string if the text is valid, else the reason why it is not.

inline auto whole_number(std::int64_t minimum, std::int64_t maximum) {
  return [=](const std::string& text) -> std::string {
    std::int64_t value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= minimum && value <= maximum) return "";
    return fmt::format("must be a whole number in [{}, {}], got '{}'", minimum, maximum, text);
  };
}

inline std::string check_learning_rate(const std::string& text) {
  double value = 0;
  if (CLI::detail::lexical_cast(text, value) && std::isfinite(value) && value > 0) return "";
  return fmt::format("must be finite and > 0, got '{}'", text);
}

inline std::string check_device(const std::string& text) {
  if (text == "cpu") return "";
  const bool numbered = text.size() > 5 && text.size() < 8 && text.starts_with("cuda:") &&
                        text.find_first_not_of("0123456789", 5) == std::string::npos;
  if (text != "cuda" && !numbered) return fmt::format("must be cpu, cuda or cuda:N, got '{}'", text);
  const int index = numbered ? std::stoi(text.substr(5)) : 0;
  const int count = torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0;
  if (index < count) return "";
  return fmt::format("must be a device of this machine, which has {} CUDA devices, got '{}'", count, text);
}

inline std::string not_empty(const std::string& text) { return text.empty() ? "must not be empty" : ""; }

inline void add_options(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--depth", options.depth, "hidden layers")->check(whole_number(1, 1000));
  app.add_option("--batch-size", options.batch_size, "samples of one forward and backward pass")
      ->check(whole_number(1, 1 << 20));
  auto* accumulate = app.add_option_function<std::string>(
      "--accumulate", [&options](const std::string& text) { options.accumulate = AccumulationSchedule(text); },
      "batches whose gradients make one update: N, or by epoch as in 0:8,4:2");
  accumulate->type_name("N|EPOCH:N,...")->default_str(options.accumulate.text());
  app.add_option("--epochs", options.epochs, "passes over the training images")->check(whole_number(1, 1'000'000));
  app.add_option("--lr", options.learning_rate, "learning rate")->check(check_learning_rate);
  app.add_option("--optimizer", options.optimizer, "momentum is sgd with a momentum of 0.9")
      ->check(CLI::IsMember({"sgd", "momentum", "adam", "adamw"}));
  app.add_option("--device", options.device, "cpu, cuda or cuda:N")->check(check_device);
  app.add_option("--dtype", options.dtype, "float64 shows how little of a difference is not rounding")
      ->check(CLI::IsMember({"float32", "float64"}));
  auto* amp = app.add_option("--amp", options.amp, "mixed precision: 16 bits where they do no harm")
                  ->check(CLI::IsMember({"off", "bf16", "fp16"}));
  app.add_option(
         "--shard", options.shard,
         "what several processes divide: each keeps the optimizer's state of its own part of the parameters, or "
         "that and the gradients")
      ->transform(CLI::CheckedTransformer(std::map<std::string, ga::Shard>{
          {"none", ga::Shard::none}, {"optimizer", ga::Shard::optimizer}, {"gradients", ga::Shard::gradients}}));
  app.add_option("--threads", options.threads, "processor threads; 0: LibTorch chooses")->check(whole_number(0, 1024));
  app.add_option("--seed", options.seed, "of the first parameters and of the order of images")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()));
  app.add_option("--data", options.data, "directory of the four IDX files, as they are or as .gz");
  app.add_flag("--compare", options.compare,
               "train with --batch-size B, with B/4 accumulated over 4 steps, and with B in bfloat16")
      ->excludes(accumulate)
      ->excludes(amp);
  app.add_flag("--trainer", options.trainer, "train with ga::Trainer, in place of the loop written by hand");
  auto* save = app.add_option("--save", options.save,
                              "save states in this directory, also when SIGINT or SIGTERM ends the training; it is "
                              "ga::Trainer that does, so this turns --trainer on");
  save->type_name("DIR")->excludes("--compare")->check(not_empty);
  app.add_option("--save-every", options.save_every, "updates from state to state")
      ->needs(save)
      ->check(whole_number(1, 1'000'000'000));
  app.add_option("--keep-last", options.keep_last, "states that are kept; 0: all")
      ->needs(save)
      ->check(whole_number(0, 1'000'000));
  app.add_flag("--resume", options.resume, "go on from the newest state in the directory of --save, if it has one")
      ->needs(save);
  app.add_option("--validate-every", options.validate_every,
                 "updates from test to test, with the Trainer; 0: at the end of an epoch alone")
      ->check(whole_number(0, 1'000'000'000));
  app.add_option(
         "--patience", options.patience,
         "tests without a lower loss after which the training ends, with the Trainer; --save keeps the best state, "
         "then; 0: the epochs decide")
      ->check(whole_number(0, 1'000'000'000));
  const auto look = [&](const char* name, std::string& value, const char* type, const std::string& what) {
    return app.add_option(name, value, what)->type_name(type)->check(not_empty);
  };
  look("--tensorboard", options.tensorboard, "DIR", "for TensorBoard's curves of the training; with the Trainer")
      ->excludes("--compare");
  look("--profile", options.profile, "DIR", "for where time and memory go in updates 11 to 13; with the Trainer")
      ->excludes("--compare");
  look("--report", options.report, "FILE",
       "a page of the training, .html, that is written on the way; with the Trainer, and with --compare of all runs");
  auto* checkpoint = app.add_option_function<std::string>(
      "--checkpoint", [&options](const std::string& text) { options.checkpoint = checkpoint_choice(text); },
      "train with all activations kept, and with some made again in backward: K segments, or as BYTES allow (12MiB)");
  checkpoint->type_name("K|BYTES")->excludes("--compare")->excludes(save);
  app.add_option("--record-step", options.record_step,
                 "record the training step in this directory, for tools/compile_step.py, and train nothing")
      ->type_name("DIR")
      ->check(not_empty);
  app.add_option("--compile", options.compile,
                 "train with the step that was recorded and compiled in this directory; --compare sets it beside the "
                 "others")
      ->type_name("DIR")
      ->excludes("--record-step")
      ->excludes(checkpoint)
      ->check(not_empty);
  app.add_flag("--no-graphs{false}", options.graphs,
               "launch each kernel of a step from the host; else a GPU replays steps as CUDA graphs");
  auto* memory_budget = app.add_option_function<std::string>(
      "--memory-budget",
      [&options](const std::string& text) {
        const auto bytes = number_of_bytes(text);
        if (!bytes)
          throw std::invalid_argument(
              "--memory-budget: must be a number of bytes, in B, KiB, MiB or GiB (12MiB), at least 1, got '" + text +
              "'");
        options.memory_budget = *bytes;
      },
      "train with --batch-size images an update at once, and in as many parts as these bytes of activations and "
      "gradients need (12MiB)");
  memory_budget->type_name("BYTES")
      ->excludes("--compare")
      ->excludes("--trainer")
      ->excludes("--record-step")
      ->excludes("--compile")
      ->excludes(save)
      ->excludes(checkpoint)
      ->excludes(accumulate)
      ->excludes(amp);
  app.add_flag("--compare-micro-batches", options.compare_micro_batches,
               "train with micro-batches of 4 x 16 and of 1 x 64, and tell time and memory of both")
      ->excludes("--compare")
      ->excludes("--trainer")
      ->excludes("--batch-size")
      ->excludes(memory_budget)
      ->excludes(save)
      ->excludes(checkpoint)
      ->excludes(accumulate)
      ->excludes(amp);
}

inline void check_together(const Options& options) {
  if (options.mixed_precision() && options.dtype != "float32")
    throw std::invalid_argument(fmt::format("--amp {}: --dtype must be float32, got {}", options.amp, options.dtype));
  if (options.compare && options.batch_size % compared_steps != 0)
    throw std::invalid_argument(
        fmt::format("--compare: --batch-size must be a multiple of {}, got {}", compared_steps, options.batch_size));
  if (const auto modules = module_count(options.depth); options.checkpoint && options.checkpoint->segments > modules)
    throw std::invalid_argument(
        fmt::format("--checkpoint: segments must be at most {}, the number of modules at a --depth of {}, got {}",
                    modules, options.depth, options.checkpoint->segments));
}

}  // namespace detail

/// Parses the command line. Ends the program after --help (status 0) or a mistake (one line, status 2).
inline Options parse_options(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a small network on FashionMNIST with gradient accumulation.", "fashion_mnist");
  detail::add_options(app, options);
  try {
    app.parse(argc, argv);
    detail::check_together(options);
    options.trainer = options.trainer || (options.needs_trainer() && !options.compare);
    return options;
  } catch (const CLI::Success& request) {
    std::exit(app.exit(request));
  } catch (const std::exception& mistake) {
    fmt::print(stderr, "fashion_mnist: {}\n", mistake.what());
    std::exit(2);
  }
}

}  // namespace fashion_mnist
