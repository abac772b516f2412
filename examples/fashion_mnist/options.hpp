// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>
#include <gradaccum/gradaccum.hpp>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <sstream>
#include <string>

namespace fashion_mnist {

namespace ga = gradaccum;

inline constexpr std::int64_t compared_steps = 4;  // --compare compares a batch of B to B/4 accumulated over 4 steps

struct Options {
  std::int64_t depth = 2, batch_size = 64, epochs = 20, save_every = 500, seed = 0;
  std::map<std::int64_t, std::int64_t> accumulate{{0, 1}};  // batches per update, by the epoch from which they apply
  double learning_rate = 1e-3;
  std::string optimizer = "sgd", amp = "off", dtype = "float32";
  std::string device = torch::cuda::is_available() ? "cuda" : "cpu";
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::string save, report, tensorboard, profile, record_step, compile;  // paths; empty: none
  std::int64_t checkpoint = 0, memory_budget = 0;                        // bytes; 0: none
  ga::Shard shard = ga::Shard::none;                                     // the state that ranks divide
  bool graphs = true;                                                    // on a GPU
  bool trainer = false, resume = false, compare = false, compare_micro_batches = false;

  torch::Dtype scalar_type() const { return dtype == "float64" ? torch::kFloat64 : torch::kFloat32; }
  bool mixed_precision() const { return amp != "off"; }
  torch::Dtype autocast_type() const { return amp == "fp16" ? torch::kHalf : torch::kBFloat16; }
};

/// Parses --accumulate: `4`, or by epoch `0:8,4:2`, which is 8 from epoch 0 and 2 from epoch 4 on.
inline std::map<std::int64_t, std::int64_t> parse_schedule(const std::string& text) {
  std::map<std::int64_t, std::int64_t> steps;
  std::istringstream entries(text.find(':') == text.npos ? "0:" + text : text);
  bool valid = true;
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto colon = std::min(entry.find(':'), entry.size());
    std::int64_t epoch = -1, count = 0;
    valid &= CLI::detail::lexical_cast(entry.substr(0, colon), epoch) && epoch >= 0;
    valid &= colon < entry.size() && CLI::detail::lexical_cast(entry.substr(colon + 1), count) && count >= 1 &&
             count < 1'000'000;
    valid &= steps.emplace(epoch, count).second;
  }
  if (valid && steps.contains(0) && !text.ends_with(',')) return steps;
  throw CLI::ValidationError("--accumulate", "must be a number of batches (4), or one by epoch, from epoch 0 on and " +
                                                 ("each epoch once (0:8,4:2), got '" + text + "'"));
}

inline void add_options(CLI::App& app, Options& options) {
  const CLI::Range positive(std::int64_t{1}, std::int64_t{1'000'000'000'000});
  const auto path = [&](const char* name, std::string& value, const char* what) {
    return app.add_option(name, value, what)->check([](const std::string& text) {
      return text.empty() ? "must not be empty" : "";
    });
  };
  const auto bytes = [&](const char* name, std::int64_t& value, const char* what) {
    return app.add_option(name, value, what)->transform(CLI::AsSizeValue(false))->check(positive);
  };
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--depth", options.depth, "hidden layers")->check(positive);
  app.add_option("--batch-size", options.batch_size, "images of a forward and backward pass")->check(positive);
  auto* const accumulate = app.add_option_function<std::string>(
      "--accumulate", [&](const std::string& text) { options.accumulate = parse_schedule(text); },
      "batches whose gradients make one update: N, or by epoch as in 0:8,4:2");
  app.add_option("--epochs", options.epochs, "passes over the training images")->check(positive);
  app.add_option("--lr", options.learning_rate, "learning rate");
  app.add_option("--optimizer", options.optimizer, "sgd or adamw")->check(CLI::IsMember({"sgd", "adamw"}));
  app.add_option("--device", options.device, "cpu, cuda or cuda:N");
  app.add_option("--dtype", options.dtype, "float64 shows how little of a difference is not rounding")
      ->check(CLI::IsMember({"float32", "float64"}));
  auto* const amp = app.add_option("--amp", options.amp, "mixed precision: 16 bits where they do no harm")
                        ->check(CLI::IsMember({"off", "bf16", "fp16"}));
  app.add_option("--seed", options.seed, "of the first parameters and of the order of images")
      ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()));
  path("--data", options.data, "directory of the four IDX files, as they are or as .gz");
  app.add_option("--shard", options.shard, "what several processes divide: the optimizer's state, or gradients, too")
      ->transform(CLI::CheckedTransformer(std::map<std::string, ga::Shard>{
          {"none", ga::Shard::none}, {"optimizer", ga::Shard::optimizer}, {"gradients", ga::Shard::gradients}}))
      ->default_str("none");
  bytes("--checkpoint", options.checkpoint, "recompute activations in backward so that the rest fits (12MiB)");
  auto* const compile =
      path("--compile", options.compile, "train with the step that was recorded and compiled in this directory");
  path("--record-step", options.record_step, "only record the training step there, for gradaccum-compile-step")
      ->excludes(compile);

  app.add_flag("--trainer", options.trainer, "train with ga::Trainer, not the loop written by hand; so do those below");
  auto* const save = path("--save", options.save, "save states in this directory, also on SIGINT and SIGTERM");
  app.add_option("--save-every", options.save_every, "updates from state to state")->needs(save)->check(positive);
  app.add_flag("--resume", options.resume, "continue from the newest state of --save, if there is one")->needs(save);
  auto* const report =
      path("--report", options.report, "write a page of curves there (.html); with --compare of all runs");
  auto* const board = path("--tensorboard", options.tensorboard, "write curves for TensorBoard in this directory");
  auto* const profile = path("--profile", options.profile, "write where the time of updates 11 to 13 goes, there");
  auto* const budget =
      bytes("--memory-budget", options.memory_budget, "split batches so that activations and gradients fit (12MiB)");

  app.add_flag("--compare", options.compare,
               "train with --batch-size B, with B/4 accumulated over 4 steps, and with B in bfloat16, compiled, with "
               "checkpoints or a budget")
      ->excludes(accumulate, amp, save, board, profile);
  app.add_flag("--compare-micro-batches", options.compare_micro_batches,
               "train with micro-batches of 4 x 16 and of 1 x 64, and print time and memory of both")
      ->excludes(accumulate, amp, save, board, profile, report, budget, compile, app.get_option("--compare"),
                 app.get_option("--batch-size"));
}

inline void check_together(Options& options) {
  if (!options.compile.empty() && options.checkpoint > 0 && !options.compare)
    throw CLI::ValidationError("--compile", "a compiled step recomputes nothing: leave out --checkpoint");
  if (options.mixed_precision() && options.dtype != "float32")
    throw CLI::ValidationError("--amp", "needs --dtype float32, got " + options.dtype);
  if (options.compare && options.batch_size % compared_steps != 0)
    throw CLI::ValidationError(
        "--compare", fmt::format("--batch-size must be a multiple of {}, got {}", compared_steps, options.batch_size));
  options.trainer |= options.memory_budget > 0 || !options.save.empty() || !options.report.empty() ||
                     !options.tensorboard.empty() || !options.profile.empty();
}

/// Parses the command line. Ends the program after --help (status 0) or a mistake (one line, status 2).
inline Options parse_options(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a small network on FashionMNIST with gradient accumulation.", "fashion_mnist");
  add_options(app, options);
  try {
    app.parse(argc, argv);
    check_together(options);
    return options;
  } catch (const CLI::Success& request) {
    std::exit(app.exit(request));
  } catch (const std::exception& mistake) {
    fmt::print(stderr, "fashion_mnist: {}\n", mistake.what());
    std::exit(2);
  }
}

}  // namespace fashion_mnist
