// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <stdexcept>
#include <utility>
#include <vector>

#include "compare_checkpoint.hpp"
#include "failing_memory.hpp"
#include "own_loop.hpp"
#include "with_trainer.hpp"

/// Shows --memory-budget: batches that need much more memory than there is are divided to fit, with an exact result.
namespace fashion_mnist {

using Rows = std::vector<std::int64_t>;  // of each micro-batch of an update

/// Measures forward and backward of the whole batch.
inline std::int64_t bytes_of_batch(const Options& options, const Dataset& dataset) {
  Setup setup(options, dataset);
  const auto batch = *setup.batches.begin();
  ga::MemoryMeter meter;
  objective(setup.model, batch).backward();
  return meter.peak_bytes();
}

/// Makes an update with micro-batches of the given rows, without the Trainer.
inline void update_by_hand(Setup& setup, Accumulator& optimizer, const ga::data::Batch& batch, const Rows& rows) {
  optimizer.set_steps(static_cast<std::int64_t>(rows.size()));
  std::int64_t from = 0;
  for (const auto count : rows) {
    const ga::data::Batch part{batch.data.narrow(0, from, count), batch.target.narrow(0, from, count)};
    optimizer.backward(objective(setup.model, part));
    optimizer.step();
    optimizer.zero_grad();
    from += count;
  }
}

/// Trains within the budget, without a given number of rows. Returns the rows of each update's micro-batches.
inline std::vector<Rows> train_in_budget(Setup& setup, const Options& options) {
  std::vector<Rows> rows;
  const ga::FitMemory* memory = nullptr;
  ga::Trainer trainer(setup.model, setup.optimizer, objective, ga::FitMemory{.budget = options.memory_budget},
                      ga::Progress{}, [&](const ga::Step&) { rows.push_back(memory->plan().last_rows); });
  memory = &trainer.policy<ga::FitMemory>();
  fmt::print("{}", fmt::streamed(trainer.fit(setup.batches, {.epochs = options.epochs, .measure_memory = true})));
  fmt::print("{}\n", fmt::streamed(memory->plan()));
  return rows;
}

inline void train_by_hand(Setup& setup, const Options& options, const std::vector<Rows>& rows) {
  Accumulator optimizer(*setup.optimizer);
  std::size_t update = 0;
  for (std::int64_t epoch = 0; epoch < options.epochs; ++epoch)
    for (const auto& batch : setup.batches) update_by_hand(setup, optimizer, batch, rows.at(update++));
}

/// Repeats one update with a failure at its first allocation, its second, and so on. Returns the number of failures.
inline std::int64_t survive_failures(const Options& options, const Dataset& dataset) {
  auto small = options;
  small.batch_size = 128;
  const auto batch = *Setup(small, dataset).batches.begin();
  for (std::int64_t n = 0;; ++n) {
    Setup survivor(small, dataset), by_hand(small, dataset);
    Accumulator optimizer(*survivor.optimizer), other(*by_hand.optimizer);
    ga::FitMemory memory{.budget = options.memory_budget};
    const bool failed = [&] {
      const FailingMemory failing(n);
      memory.backward(optimizer, survivor.model, batch, objective);
      return failing.failed();
    }();
    optimizer.step();
    optimizer.zero_grad();
    update_by_hand(by_hand, other, batch, memory.plan().last_rows);
    if (!same_bits(survivor.model->parameters(), by_hand.model->parameters()))
      throw std::runtime_error("--memory-budget: an update that ran out of memory must be that of its micro-batches");
    if (!failed) return n;
  }
}

inline void compare_memory(const Options& options, const Dataset& dataset) {
  const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  const auto all = bytes_of_batch(options, dataset);
  fmt::print(
      "An update of {} images at once takes {:.1f} MiB for activations and gradients; the budget is {:.1f}: {:.1f} "
      "times less\n\n",
      options.batch_size, mib(all), mib(options.memory_budget),
      static_cast<double>(all) / static_cast<double>(options.memory_budget));
  Setup whole(options, dataset), divided(options, dataset), by_hand(options, dataset);
  fmt::print("At once\n{}\n", fmt::streamed(measure_with_trainer(whole, options)));
  fmt::print("Within the budget: the first update measures how many rows fit\n");
  std::fflush(stdout);
  const auto rows = train_in_budget(divided, options);
  fmt::print("By hand, with as many rows, to compare\n\n");
  std::fflush(stdout);
  train_by_hand(by_hand, options, rows);
  if (!same_bits(divided.model->parameters(), by_hand.model->parameters()))
    throw std::runtime_error("--memory-budget: parameters must be those of accumulation by hand, to the bit");
  const auto [largest, relative] = difference(whole.model->parameters(), divided.model->parameters());
  fmt::print(
      "The parameters are those of accumulation by hand with as many rows, to the bit; from those of updates at once\n"
      "they differ by at most {:.1e}, and by {:.1e} of their norm.\n",
      largest, relative);
  if (options.device != "cpu") return;
  fmt::print("One update again and again, whose memory ends at its first allocation, at its second, ...\n");
  std::fflush(stdout);
  fmt::print("An update whose memory ended at each of its {} allocations went on, and was that of its micro-batches.\n",
             survive_failures(options, dataset));
}

}  // namespace fashion_mnist
