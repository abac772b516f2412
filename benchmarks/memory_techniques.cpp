// SPDX-License-Identifier: Apache-2.0
//
// Techniques that save memory, alone and combined, on a transformer language model: peak memory of a training, time of
// a step, and the loss after training, compared to LibTorch's plain loop with torch::optim::AdamW. All train on the
// same batches, alternately.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <gradaccum/autocast.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness.hpp"
#include "language_model.hpp"
#include "technique.hpp"

namespace ga = gradaccum;
using harness::ModelShape, harness::OptimizerKind, harness::Technique, harness::Tokens, harness::Training;

namespace {

struct BenchmarkOptions {
  std::string model = "both";
  std::int64_t batch_size = 8, length = 128;
  std::optional<std::int64_t> steps;
  double learning_rate = 1e-3, adafactor_learning_rate = 3e-2;
  std::vector<std::string> only;
};

struct BenchmarkedModel {
  ModelShape shape;
  std::int64_t steps;          ///< by default
  double budget, in_backward;  ///< of checkpoints with all techniques combined: shares of the plain activations
};

/// Small vocabularies: with BLOOM's or Llama's, logits would take most of the memory of such small batches. The budgets
/// let the 27 M model train in a third of the memory; the larger a model, the less its activations matter.
const std::vector<BenchmarkedModel> models = {
    {{.name = "tiny", .width = 32, .heads = 4, .blocks = 32, .vocabulary = 512}, 100, 0.02, 0.06},
    {{.name = "small", .width = 256, .heads = 4, .blocks = 30, .vocabulary = 6144}, 60, 0.02, 0.06},
    {{.name = "large", .width = 640, .heads = 10, .blocks = 18, .vocabulary = 8192}, 12, 0.06, 0.12},
};

enum class Bfloat16 { none, autocast, parameters };

/// Returns the techniques; all are compared with the first.
std::vector<Technique> techniques_for(const BenchmarkedModel& model) {
  using enum OptimizerKind;
  using enum Bfloat16;
  std::vector<Technique> techniques{
      {.name = "plain loop, torch::optim::AdamW", .optimizer = torch_adamw},
      {.name = "ga::optim::AdamW"},
      {.name = "accumulation, 4 micro-batches", .micro_batches = 4},
      {.name = "checkpoints, half the activations", .activations = 0.5},
      {.name = "bfloat16 autocast", .autocast = true},
      {.name = "Adafactor", .optimizer = adafactor},
      {.name = "AdamW8bit", .optimizer = adamw8bit},
      {.name = "AdamW in backward", .in_backward = true},
      {.name = "bfloat16 parameters, AdamW", .bfloat16_parameters = true},
  };
  // Combines checkpoints, bfloat16 and accumulation; the latter not in backward, which would have to keep sums. In
  // float32, where activations are twice as large, micro-batches have half the size.
  const auto all = [&](const std::string& name, Bfloat16 bfloat16) {
    for (const bool in_backward : {false, true})
      for (const auto optimizer : {adamw8bit, adafactor})
        techniques.push_back({.name = name + (optimizer == adamw8bit ? ", AdamW8bit" : ", Adafactor") +
                                      (in_backward ? " in backward" : ""),
                              .optimizer = optimizer,
                              .micro_batches = in_backward        ? 1
                                               : bfloat16 == none ? 8
                                                                  : 4,
                              .activations = in_backward ? model.in_backward : model.budget,
                              .autocast = bfloat16 == autocast,
                              .bfloat16_parameters = bfloat16 == parameters,
                              .in_backward = in_backward});
  };
  all("all in float32", none);
  all("all", autocast);
  all("all in bfloat16", parameters);
  return techniques;
}

/// The results of a technique.
struct Row {
  Technique technique;
  double parameters = 0, peak = 0;  ///< of the training: bytes
  double kept = 0;                  ///< of the peak: weights, gradients, and state of the optimizer
  double gradient = 0;              ///< in backward: the largest gradient, which is temporary; else 0
  double time = 0;                  ///< of a step: seconds
  double time_ratio = 0;            ///< relative to the plain loop's step on the same batch
  double loss = 0;                  ///< on other text, after training
};

/// Trains with all techniques, alternately.
class Contest {
 public:
  Contest(const BenchmarkedModel& model, const BenchmarkOptions& options, int repeats)
      : techniques_(techniques_for(model)), chain_(model.shape.vocabulary), options_(options) {
    settings_ = {.shape = model.shape,
                 .rows = options.batch_size,
                 .length = options.length,
                 .learning_rate = options.learning_rate,
                 .adafactor_learning_rate = options.adafactor_learning_rate};
    settings_.plain_activations = harness::plain_activations(settings_);
    const auto steps = options.steps.value_or(model.steps);
    evaluate_ = steps > 0;
    steps_ = std::max<std::int64_t>(steps, measured_steps + repeats);
  }

  std::vector<Row> run() {
    for (auto& technique : techniques_)
      if (wanted(technique)) measure_memory(technique);
    train();
    if (evaluate_) evaluate();
    return std::move(rows_);
  }

  std::int64_t steps() const { return steps_; }

 private:
  static constexpr std::int64_t measured_steps = 3;

  bool wanted(const Technique& technique) const {
    const bool takes_bfloat16 = technique.autocast || technique.bfloat16_parameters;
    if (takes_bfloat16 && !ga::is_bf16_fast(at::kCPU)) return false;
    return options_.only.empty() || &technique == &techniques_.front() ||
           std::ranges::any_of(options_.only,
                               [&](auto& part) { return technique.name.find(part) != std::string::npos; });
  }

  Tokens batch(std::int64_t number) const { return chain_.batch(number, settings_.rows, settings_.length); }

  /// Measures the peak from before the model is made through the first steps.
  void measure_memory(const Technique& technique) {
    progress_.update({}, 0, [&] { return fmt::format("{}: memory of '{}'", settings_.shape.name, technique.name); });
    Row row{technique};
    ga::MemoryMeter meter;
    auto& training = trainings_.emplace_back(technique, settings_);
    meter.reset_peak();  // excludes the check of the budget
    for (std::int64_t step = 0; step < measured_steps; ++step) {
      const auto tokens = batch(step);
      training.step(tokens);
      row.kept = static_cast<double>(meter.live_bytes());
      training.clear();
    }
    row.peak = static_cast<double>(meter.peak_bytes());
    row.parameters = static_cast<double>(training.parameters());
    if (technique.in_backward) row.gradient = static_cast<double>(training.largest_gradient());
    rows_.push_back(row);
  }

  /// Trains with all techniques on each batch, timed, in alternating order.
  void train() {
    std::vector<std::vector<double>> times(rows_.size()), ratios(rows_.size());
    double loss = 0;
    progress_.restart();
    for (std::int64_t step = measured_steps; step < steps_; ++step) {
      const auto tokens = batch(step);
      for (std::size_t i = 0; i < rows_.size(); ++i) {
        const auto turn = step % 2 ? rows_.size() - 1 - i : i;
        times[turn].push_back(harness::seconds([&] {
          const auto mean = trainings_[turn].step(tokens);
          trainings_[turn].clear();
          if (turn == 0) loss = mean;
        }));
      }
      for (std::size_t i = 0; i < rows_.size(); ++i) ratios[i].push_back(times[i].back() / times[0].back());
      progress_.update(static_cast<double>(step + 1 - measured_steps) / static_cast<double>(steps_ - measured_steps),
                       (step + 1) * settings_.rows * static_cast<std::int64_t>(rows_.size()),
                       [&] { return fmt::format("{}: step {} | loss {:.4f}", settings_.shape.name, step + 1, loss); });
    }
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      rows_[i].time = harness::median(times[i]);
      rows_[i].time_ratio = harness::median(ratios[i]);
    }
  }

  void evaluate() {
    constexpr std::int64_t held_out = 1'000'000;
    std::vector<Tokens> batches;
    for (std::int64_t i = 0; i < 4; ++i) batches.push_back(batch(held_out + i));
    for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i].loss = trainings_[i].evaluate(batches);
  }

  std::vector<Technique> techniques_;
  harness::MarkovChain chain_;
  BenchmarkOptions options_;
  harness::TrainingSettings settings_;
  std::int64_t steps_ = 0;
  bool evaluate_ = true;
  std::deque<Training> trainings_;  // one per row
  std::vector<Row> rows_;
  ga::ProgressLine progress_{{.only_on_terminal = true}};
};

/// Prints the cost and saving of a technique, relative to the plain loop.
void print(const Row& row, const Row& plain, const harness::Options& options, const std::string& title) {
  fmt::print("  {:<40} {:>8.1f} {:>8.1f} {:>8.1f} {:>7.2f} x {:>8.1f} {:>6.2f} x", row.technique.name,
             row.peak / ga::MiB, row.peak / row.parameters, (row.kept + row.gradient) / row.parameters,
             plain.peak / row.peak, 1e3 * row.time, row.time_ratio);
  if (row.loss > 0) fmt::print("  {:>7.4f} {:>+6.2f} %", row.loss, 100 * (row.loss / plain.loss - 1));
  fmt::print("\n");
  harness::append_json(
      options, fmt::format(R"({{"benchmark": "{}", "technique": "{}", "parameters": {}, "peak_bytes": {}, )"
                           R"("weights_gradients_state_bytes": {}, "step_s": {}, "time_over_plain": {}, "loss": {}}})",
                           title, row.technique.name, row.parameters, row.peak, row.kept + row.gradient, row.time,
                           row.time_ratio, row.loss > 0 ? fmt::format("{}", row.loss) : "null"));
}

/// Finds rows by name for sentences about them; sentences about missing rows are skipped.
class Rows {
 public:
  explicit Rows(const std::vector<Row>& rows) : rows_(rows) {}
  void about(const std::string& name, const std::function<void(const Row& plain, const Row& row)>& say) const {
    for (auto& row : rows_)
      if (row.technique.name == name) say(rows_.front(), row);
  }

 private:
  const std::vector<Row>& rows_;
};

/// Returns the optimizer's bytes per parameter, without float32 weights and gradients.
double state_of(const Row& row) { return row.kept / row.parameters - 8; }

/// Compares with claims of a fine-tuning guide, for its own models and devices.
void print_claims(const Rows& rows) {
  const auto say = [&](const std::string& name, const std::string& claim, const auto& here) {
    rows.about(name,
               [&](const Row& plain, const Row& row) { fmt::print("  {:<92} here: {}\n", claim, here(plain, row)); });
  };
  const auto memory_and_time = [](const Row& plain, const Row& row) {
    return fmt::format("{:.0f} % less for {:+.1f} % time", 100 * (1 - row.peak / plain.peak),
                       100 * (row.time_ratio - 1));
  };
  const auto optimizer_memory = [](const Row& plain, const Row& row) {
    return fmt::format("{:.0f} % less", 100 * (1 - state_of(row) / state_of(plain)));
  };
  const auto together = [](const Row& plain, const Row& row) {
    return fmt::format("{:.2f} x less, {:.2f} x as fast", plain.peak / row.peak, 1 / row.time_ratio);
  };
  fmt::print("  A fine-tuning guide:\n");
  say("checkpoints, half the activations", "checkpointing: 20-30 % less memory for about 20 % more time",
      memory_and_time);
  say("bfloat16 autocast", "mixed precision: up to 2 x as fast", together);
  say("Adafactor", "Adafactor: about 50 % less optimizer memory than Adam", optimizer_memory);
  say("AdamW8bit", "8-bit Adam: similar savings", optimizer_memory);
  for (auto* name : {"all, AdamW8bit", "all, Adafactor", "all in bfloat16, AdamW8bit", "all in bfloat16, Adafactor",
                     "all in float32, AdamW8bit", "all in float32, Adafactor", "all, AdamW8bit in backward",
                     "all, Adafactor in backward"})
    say(name, fmt::format("all combined ({}): up to 3 x less memory at the same speed or better", name), together);
}

/// Returns the saving if a quarter of the activations remains; weights, gradients and state cannot be saved.
double reachable_saving(const Row& plain, const Row& row) {
  return plain.peak / (row.kept + row.gradient + (plain.peak - plain.kept) / 4);
}

void print_targets(const Rows& rows, bool evaluated) {
  const auto say = [](const std::string& target, double measured, double bound, bool met) {
    fmt::print("  {:<72} {:>7.2f}, wanted {:>7.2f}: {}\n", target, measured, bound, met ? "met" : "MISSED");
  };
  const auto at_most = [&](const std::string& name, const std::string& what, double bound, const auto& of) {
    rows.about(name, [&](const Row& plain, const Row& row) {
      const double measured = of(plain, row);
      say(fmt::format("{}: {}, at most", name, what), measured, bound, measured <= bound);
    });
  };
  const auto kept = [](const Row&, const Row& row) { return row.kept / row.parameters; };
  fmt::print("  Targets:\n");
  at_most("ga::optim::AdamW", "bytes a parameter", 16.1, kept);
  at_most("AdamW8bit", "bytes a parameter", 10.1, kept);
  at_most("Adafactor", "bytes a parameter", 8.1, kept);
  at_most("AdamW in backward", "bytes a parameter, without the gradient on its way", 12.1, kept);
  at_most("all, Adafactor in backward", "bytes a parameter, without the gradient on its way", 4.1, kept);
  for (auto* name : {"all, AdamW8bit", "all, Adafactor", "all, AdamW8bit in backward", "all, Adafactor in backward",
                     "all in bfloat16, AdamW8bit", "all in bfloat16, Adafactor"}) {
    rows.about(name, [&](const Row& plain, const Row& row) {
      const double saved = plain.peak / row.peak, reachable = reachable_saving(plain, row);
      say(fmt::format("{}: x less memory, at least", name), saved, reachable, saved >= reachable);
    });
    at_most(name, "time over the plain loop's", 1, [](const Row&, const Row& row) { return row.time_ratio; });
    if (evaluated)
      at_most(name, "loss above the plain loop's, %", 1,
              [](const Row& plain, const Row& row) { return 100 * (row.loss / plain.loss - 1); });
  }
}

void compare(const BenchmarkedModel& model, const BenchmarkOptions& more, const harness::Options& options) {
  Contest contest(model, more, options.repeats);
  const auto rows = contest.run();
  const auto& shape = model.shape;
  const auto title = fmt::format(
      "Memory techniques: a transformer of {} blocks of width {}, {} words: {:.2f} M "
      "parameters; batches of {} x {} tokens",
      shape.blocks, shape.width, shape.vocabulary, rows[0].parameters / 1e6, more.batch_size, more.length);
  fmt::print("{}\n  {}\n", title, harness::machine(options));
  fmt::print("  {} steps by each; learning rate {}, Adafactor {}; the best possible loss is {:.4f}\n", contest.steps(),
             more.learning_rate, more.adafactor_learning_rate, harness::MarkovChain::entropy());
  fmt::print("  {:<40} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8} {:>9}\n", "", "peak", "bytes a", "without", "memory", "step",
             "time", "loss");
  fmt::print("  {:<40} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}\n", "", "MiB", "param.", "activ.", "saved", "ms", "");
  for (auto& row : rows) print(row, rows[0], options, title);
  print_claims(Rows(rows));
  print_targets(Rows(rows), rows[0].loss > 0);
  fmt::print("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  BenchmarkOptions more;
  const auto options = harness::parse(
      argc, argv, "Techniques that save memory, alone and together, on a transformer", [&](CLI::App& app) {
        app.add_option("--model", more.model, "small (27 M parameters), large (99 M), both, or tiny")
            ->check(CLI::IsMember({"tiny", "small", "large", "both"}));
        app.add_option("--batch-size", more.batch_size, "sequences a batch, a multiple of 8")
            ->check(CLI::Range(8, 4096));
        app.add_option("--length", more.length, "tokens a sequence")->check(CLI::Range(1, 65536));
        app.add_option("--steps", more.steps, "steps by each; 0: as few as it takes to time them, and no loss")
            ->check(CLI::Range(0, 1'000'000));
        app.add_option("--learning-rate", more.learning_rate, "of AdamW and AdamW8bit")->check(CLI::PositiveNumber);
        app.add_option("--adafactor-learning-rate", more.adafactor_learning_rate, "relative to the weights' size")
            ->check(CLI::PositiveNumber);
        app.add_option("--only", more.only, "techniques whose names contain one of these, beside the plain loop");
      });
  for (auto& model : models)
    if (more.model == model.shape.name || (more.model == "both" && model.shape.name != "tiny"))
      compare(model, more, options);
}
