// SPDX-License-Identifier: Apache-2.0
//
// Activation checkpointing within a byte budget, compared to the rule of Python's checkpoint_sequential with the
// fastest number of segments within the same budget; and the overhead of a checkpoint.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <fstream>
#include <functional>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chains.hpp"
#include "harness.hpp"
#include "trade_off_picture.hpp"

namespace ga = gradaccum;

namespace {

using Forward = std::function<at::Tensor(at::Tensor)>;

/// Python's rule: size / segments modules each, and the rest in the last segment, which is not checkpointed. Its
/// reentrant form recomputes whole segments; the other stops early, like ours.
Forward checkpoint_sequential(torch::nn::Sequential stages, std::int64_t segments, bool reentrant) {
  std::vector<torch::nn::Sequential> parts;
  const auto size = static_cast<std::int64_t>(stages->size()) / segments;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(stages->size()); ++i) {
    if (i % size == 0 && i / size < segments) parts.emplace_back();
    parts.back()->push_back(*(stages->begin() + i));
  }
  return [parts, options = ga::CheckpointOptions{.early_stop = !reentrant}](at::Tensor x) mutable {
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) x = ga::checkpoint(options, parts[i], x);
    return parts.back()->forward(x);
  };
}

/// A training step without its optimizer.
class Step {
 public:
  explicit Step(harness::Chain chain) : chain_(chain), weights_(torch::randn_like(chain.stages->forward(chain.input))) {
    for (auto& parameter : chain.stages->parameters())
      parameter.register_hook([this](const at::Tensor& gradient) {
        if (log_) log_->exclude(gradient);
      });
  }
  Step(const Step&) = delete;

  void run(const Forward& forward) { (forward(chain_.input) * weights_).sum().backward(); }

  /// Returns the peak bytes without input, output, loss and gradients of parameters.
  std::int64_t peak_bytes(const Forward& forward) {
    const ga::detail::AllocationScope scope("peak_bytes: must not run inside LibTorch's profiler");
    log_ = &*scope;
    {
      const auto output = forward(chain_.input);
      const auto product = output * weights_;
      const auto loss = product.sum();
      for (auto& tensor : {output, product, loss}) scope->exclude(tensor);
      loss.backward();
    }
    log_ = nullptr;
    return scope->between(0, scope->now()).peak;
  }

 private:
  harness::Chain chain_;
  at::Tensor weights_;
  ga::detail::AllocationLog* log_ = nullptr;
};

/// A way to run the chain: its memory, and its time relative to the plain chain, measured alternately.
struct Contestant {
  std::string name;
  Forward forward;
  std::int64_t peak = 0;
  double time = 0;
};

/// Measures medians of times relative to plain, alternately.
void time_all(Step& step, const Forward& plain, std::vector<Contestant*> all, int repeats) {
  std::vector<std::vector<double>> ratios(all.size());
  for (auto* each : all) step.run(each->forward);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const double before = harness::seconds([&] { step.run(plain); });
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto turn = repeat % 2 ? all.size() - 1 - i : i;  // alternates the order
      ratios[turn].push_back(harness::seconds([&] { step.run(all[turn]->forward); }));
    }
    const double after = harness::seconds([&] { step.run(plain); });
    for (auto& each : ratios) each.back() /= (before + after) / 2;
  }
  for (std::size_t i = 0; i < all.size(); ++i) all[i]->time = harness::median(ratios[i]);
}

/// Times every number of segments of Python's rule; and plain, which is the case without recomputation.
std::vector<Contestant> segment_rules(const harness::Chain& chain, Step& step, const Forward& plain, bool reentrant) {
  std::vector<Contestant> rules;
  for (std::int64_t segments = 2; segments <= static_cast<std::int64_t>(chain.stages->size()); ++segments) {
    auto forward = checkpoint_sequential(chain.stages, segments, reentrant);
    const auto peak = step.peak_bytes(forward);
    rules.push_back({fmt::format("{} segments", segments), std::move(forward), peak});
  }
  std::vector<Contestant*> all;
  for (auto& rule : rules) all.push_back(&rule);
  time_all(step, plain, all, 2);
  rules.push_back({"plain", plain, step.peak_bytes(plain), 1});
  return rules;
}

/// Returns the fastest that fits.
std::optional<Contestant> best_within(const std::vector<Contestant>& rules, std::int64_t budget) {
  std::optional<Contestant> best;
  for (auto& rule : rules)
    if (rule.peak <= budget && (!best || rule.time < best->time)) best = rule;
  return best;
}

std::string percent(double part) { return fmt::format("{:.1f} %", 100 * part); }

/// Formats a peer's segments, bytes relative to plain, and time relative to plain and to ours.
std::string peer_columns(const std::optional<Contestant>& peer, const Contestant& ours, std::int64_t plain_peak) {
  if (!peer) return fmt::format("{:<43}", "none fits");
  return fmt::format("{:<12} {:>7} {:>+6.1f} %  {:.2f} x ours ", peer->name,
                     percent(static_cast<double>(peer->peak) / static_cast<double>(plain_peak)), 100 * (peer->time - 1),
                     peer->time / ours.time);
}

harness::TradeOff compare(harness::Chain chain, const harness::Options& options) {
  Step step(chain);
  const Forward plain = [stages = chain.stages](const at::Tensor& x) mutable { return stages->forward(x); };
  const auto plain_peak = step.peak_bytes(plain);
  const auto of_plain = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / static_cast<double>(plain_peak);
  };
  fmt::print("Memory for time: {}; {:.1f} MiB without checkpoints\n  {}\n", chain.name,
             static_cast<double>(plain_peak) / (1 << 20), harness::machine(options));
  fmt::print("   budget    taken     time (predicted)  {:<43}{}\n", "checkpoint_sequential, stopping early",
             "checkpoint_sequential, reentrant");
  const auto early_rules = segment_rules(chain, step, plain, /*reentrant=*/false),
             reentrant_rules = segment_rules(chain, step, plain, /*reentrant=*/true);

  harness::TradeOff picture{chain.name, {}, {}};
  for (auto& rule : early_rules) picture.peer.push_back({of_plain(rule.peak), rule.time});
  for (const double share : {1.0, 0.9, 0.75, 0.6, 0.5, 0.35, 0.25, 0.125, 0.1, 0.08}) {
    const auto budget = static_cast<std::int64_t>(share * static_cast<double>(plain_peak));
    ga::CheckpointedSequential model(chain.stages, {.memory_budget = budget});
    Contestant ours{"ours", [&](const at::Tensor& x) { return model->forward(x); }};
    try {
      ours.peak = step.peak_bytes(ours.forward);
    } catch (const c10::Error& error) {
      fmt::print("  {:>7}  {}\n", percent(share), error.what_without_backtrace());
      continue;
    }
    TORCH_CHECK(ours.peak <= budget, "a budget of ", budget, " bytes was exceeded: ", ours.peak);
    auto early = best_within(early_rules, budget), reentrant = best_within(reentrant_rules, budget);
    std::vector<Contestant*> all{&ours};
    for (auto* peer : {&early, &reentrant})
      if (*peer) all.push_back(&**peer);
    time_all(step, plain, all, options.repeats);
    const auto plan = model->plan();
    fmt::print("  {:>7}  {:>7}  {:>+5.1f} % {:<11}  {}{}\n", percent(share), percent(of_plain(ours.peak)),
               100 * (ours.time - 1),
               fmt::format("({:+.1f} %)", 100 * (plan.predicted.seconds / plan.plain.seconds - 1)),
               peer_columns(early, ours, plain_peak), peer_columns(reentrant, ours, plain_peak));
    std::fflush(stdout);
    picture.ours.push_back({of_plain(ours.peak), ours.time});
    harness::append_json(options, fmt::format(R"({{"benchmark": "checkpoint, {}", "budget": {}, "ours_bytes": {}, )"
                                              R"("ours_time": {}, "early_time": {}, "reentrant_time": {}}})",
                                              chain.name, share, ours.peak, ours.time, early ? early->time : 0,
                                              reentrant ? reentrant->time : 0));
  }
  return picture;
}

/// Compares with a fine-tuning guide's claim: checkpointing takes 20 to 30 % less memory for about 20 % more time.
void print_claim(const harness::TradeOff& picture) {
  for (auto& point : picture.ours)
    if (point.memory <= 0.8) {
      fmt::print(
          "A fine-tuning guide: 20-30 % less memory for about 20 % more time. Here: {:.0f} % less for {:.1f} % "
          "more.\n\n",
          100 * (1 - point.memory), 100 * (point.time - 1));
      return;
    }
}

/// Measures the time of a checkpoint beyond recomputing its part once.
void compare_overhead(const harness::Options& options) {
  torch::manual_seed(0);
  torch::nn::Sequential part(torch::nn::Linear(8, 8), torch::nn::GELU(), torch::nn::Linear(8, 8), torch::nn::GELU());
  const auto x = torch::randn({1, 8}, torch::requires_grad());
  const auto step = [](const at::Tensor& y) { y.sum().backward(); };
  harness::contest(
      "A checkpoint of two tiny layers, forward and backward",
      {{"checkpoint", [&] { step(ga::checkpoint(part, x)); }},
       {"checkpoint, {.preserve_rng = false}", [&] { step(ga::checkpoint({.preserve_rng = false}, part, x)); }},
       {"plain, the forward pass twice",
        [&] {
          part->forward(x);
          step(part->forward(x));
        }},
       {.name = "bound: plain", .run = [&] { step(part->forward(x)); }, .bound = true}},
      1, "steps", options);
}

}  // namespace

int main(int argc, char** argv) {
  std::string svg;
  const auto options =
      harness::parse(argc, argv, "Activation checkpointing within a byte budget, against checkpoint_sequential",
                     [&](CLI::App& app) { app.add_option("--svg", svg, "draw the trade-off into this file"); });
  std::vector<harness::TradeOff> pictures;
  for (auto& chain : {harness::heterogeneous_chain(), harness::transformer_chain()}) {
    pictures.push_back(compare(chain, options));
    print_claim(pictures.back());
  }
  compare_overhead(options);
  if (!svg.empty()) std::ofstream(svg) << harness::to_svg(pictures);
}
