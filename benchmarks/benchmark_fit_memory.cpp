// SPDX-License-Identifier: Apache-2.0
//
// Micro-batches that `FitMemory` finds, compared to the best number of rows that a search by trial finds within the
// same bytes; the cost of finding them, and the part of the budget that is used. Then, for several budgets, rows alone,
// checkpoints alone and both.

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/fit_memory.hpp>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "harness.hpp"

namespace ga = gradaccum;

namespace {

using Batch = std::pair<at::Tensor, at::Tensor>;

torch::nn::Sequential make_stages(std::int64_t width, int depth) {
  torch::manual_seed(0);
  torch::nn::Sequential stages;
  for (int i = 0; i < depth; ++i) {
    stages->push_back(torch::nn::Linear(width, width));
    stages->push_back(torch::nn::GELU());
  }
  stages->push_back(torch::nn::Linear(width, 10));
  return stages;
}

Batch make_batch(std::int64_t rows, std::int64_t width) {
  return {torch::randn({rows, width}), torch::randint(10, {rows}, torch::kLong)};
}

at::Tensor objective(torch::nn::Sequential& model, const Batch& rows) {
  return torch::cross_entropy_loss(model->forward(rows.first), rows.second);
}

/// A model with an optimizer, and two ways to make an update.
struct Training {
  torch::nn::Sequential model;
  ga::optim::AdamW adamw{model->parameters(), torch::optim::AdamWOptions(1e-4)};
  ga::GradAccumulator<ga::optim::AdamW> optimizer{adamw};

  explicit Training(torch::nn::Sequential of) : model(std::move(of)) {}

  void step() {
    optimizer.step();
    optimizer.zero_grad();
  }
  void fitted(ga::FitMemory::Running& memory, Batch& batch) {
    optimizer.set_steps(1);
    memory.backward(optimizer, model, batch, objective);
    step();
  }
  void fixed(const Batch& batch, std::int64_t rows) {
    const auto all = batch.first.size(0);
    optimizer.set_steps((all + rows - 1) / rows);
    for (std::int64_t from = 0; from < all; from += rows) {
      const auto count = std::min(rows, all - from);
      const Batch part{batch.first.narrow(0, from, count), batch.second.narrow(0, from, count)};
      optimizer.backward(ga::Loss{objective(model, part), count});
      step();
    }
  }
  std::int64_t peak_of_fixed(const Batch& batch, std::int64_t rows) {
    ga::MemoryMeter meter;
    fixed(batch, rows);
    return meter.peak_bytes();
  }
};

/// Returns the best number of rows within the budget, tried in steps of eight.
std::int64_t best_rows(Training& training, const Batch& batch, std::int64_t budget) {
  std::int64_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (std::int64_t rows = 8; rows <= batch.first.size(0); rows += 8) {
    if (training.peak_of_fixed(batch, rows) > budget) break;
    double seconds = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3; ++i) seconds = std::min(seconds, harness::seconds([&] { training.fixed(batch, rows); }));
    if (seconds < least) least = seconds, best = rows;
  }
  return best;
}

void against_the_best(const harness::Options& options) {
  constexpr std::int64_t rows = 4096, width = 512, budget = 24 * ga::MiB;
  auto batch = make_batch(rows, width);
  Training ours(make_stages(width, 4)), theirs(make_stages(width, 4));
  ours.fixed(batch, 64), theirs.fixed(batch, 64);  // creates the optimizer's state
  ga::FitMemory::Running memory({.budget = budget});
  const auto first = harness::seconds([&] { ours.fitted(memory, batch); });
  const auto best = best_rows(theirs, batch, budget);
  std::int64_t peak = 0;
  {
    ga::MemoryMeter meter;
    memory.backward(ours.optimizer, ours.model, batch, objective);
    peak = meter.peak_bytes();
    ours.step();
  }
  std::vector<double> later;
  for (int i = 0; i < 5; ++i) later.push_back(harness::seconds([&] { ours.fitted(memory, batch); }));
  harness::contest("An update of 4096 rows within 24 MiB, 512 x 5 layers, AdamW",
                   {{"FitMemory", [&] { ours.fitted(memory, batch); }},
                    {fmt::format("the best fixed micro-batch, {} rows", best), [&] { theirs.fixed(batch, best); }}},
                   static_cast<double>(rows), "rows", options);
  fmt::print(
      "  {} rows at once; {:.1f} % of the budget are used; the first update, which finds that, takes {:.2f} times as "
      "long\n",
      memory.plan().last_rows.front(), 100.0 * static_cast<double>(peak) / static_cast<double>(budget),
      first / harness::median(later));
}

/// Returns rows per second within a budget; empty if a single row does not fit.
std::optional<double> speed(torch::nn::Sequential model, std::int64_t budget, Batch& batch,
                            const std::function<void(Training&, Batch&)>& update) {
  Training training(std::move(model));
  try {
    for (int i = 0; i < 4; ++i) update(training, batch);  // lets it find a division
    ga::MemoryMeter meter;
    std::vector<double> seconds;
    for (int i = 0; i < 5; ++i) seconds.push_back(harness::seconds([&] { update(training, batch); }));
    if (meter.peak_bytes() > budget + budget / 20) return std::nullopt;
    return static_cast<double>(batch.first.size(0)) / harness::median(seconds);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

void rows_and_checkpoints() {
  constexpr std::int64_t rows = 512, width = 512;
  auto batch = make_batch(rows, width);
  fmt::print("Rows a second within a budget: 17 layers of 512 with GELU, 512 rows an update\n");
  fmt::print("  {:>10} {:>14} {:>18} {:>10}\n", "MiB", "rows alone", "checkpoints alone", "both");
  const auto shown = [](std::optional<double> speed) {
    return speed ? fmt::format("{:.0f}", *speed) : std::string("-");
  };
  for (const std::int64_t mib : {19, 20, 22, 26, 34, 66}) {
    const auto budget = mib * ga::MiB;
    const auto fitted = [&](std::vector<ga::CheckpointedSequential> parts) {
      auto memory =
          std::make_shared<ga::FitMemory::Running>(ga::FitMemory{.budget = budget, .checkpointed = std::move(parts)});
      return [memory](Training& training, Batch& all) { training.fitted(*memory, all); };
    };
    const auto checkpointed = [&](std::int64_t bytes) {
      return ga::CheckpointedSequential(make_stages(width, 16),
                                        ga::CheckpointedSequentialOptions{.memory_budget = bytes});
    };
    const auto gradients = 17 * width * width * 4;
    const auto alone =
        speed(torch::nn::Sequential(checkpointed(std::max<std::int64_t>(budget - gradients - 4 * ga::MiB, 1))), budget,
              batch, [](Training& training, Batch& all) { training.fixed(all, rows); });
    auto part = checkpointed(ga::GiB);
    fmt::print("  {:>10} {:>14} {:>18} {:>10}\n", mib, shown(speed(make_stages(width, 16), budget, batch, fitted({}))),
               shown(alone), shown(speed(torch::nn::Sequential(part), budget, batch, fitted({part}))));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  auto options = harness::parse(argc, argv, "Micro-batches that fit against the best that a person finds");
  options.keep_memory = true;  // otherwise glibc returns and maps large micro-batches' memory
  ga::keep_freed_memory();
  against_the_best(options);
  rows_and_checkpoints();
}
