// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "model.hpp"

/// The first of two starting points: an ordinary LibTorch loop, with GradAccumulator around the optimizer.
namespace fashion_mnist {

using Accumulator = ga::GradAccumulator<torch::optim::Optimizer>;

/// Runs forward, in 16 bits if --amp is given. Backward stays outside, because it uses the dtypes of forward anyway.
inline ga::Loss forward(const Objective& objective, Network& model, const ga::data::Batch& batch,
                        const Options& options) {
  const ga::Autocast autocast(batch.data.device(), options.autocast_type(), options.mixed_precision());
  return objective(model, batch);
}

/// Trains one epoch. `progress` draws a line for each batch.
inline void train_epoch(Setup& setup, const Objective& objective, Accumulator& optimizer, ga::AmpScaler& scaler,
                        ga::Replicas& replicas, const Options& options, const auto& progress) {
  setup.model->train();
  for (const auto& batch : setup.batches) {
    const auto loss = forward(objective, setup.model, batch, options);
    scaler.scale(loss).backward();
    scaler.step(optimizer);  // updates when the window is full, unless float16 overflowed
    scaler.update();
    optimizer.zero_grad();  // does nothing inside a window
    progress(batch, loss);
  }
  optimizer.flush();  // a shorter last window has its own mean
  scaler.update();
  while (replicas.others_continue()) {  // a rank may have a batch less than others
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
}

inline ga::Evaluation evaluate(Setup& setup, const Options& options) {
  const torch::NoGradGuard no_grad;
  setup.model->eval();
  ga::MeanLoss loss;
  ga::Accuracy accuracy;
  for (const auto& batch : setup.test_batches) {
    const auto one = forward(objective, setup.model, batch, options);
    loss.add(one);
    accuracy.add(one);
  }
  return {.metrics = {{"loss", loss.value()}, {"accuracy", accuracy.value()}}};
}

/// Sets and prints the number of micro-batches of an update in the epochs that --accumulate names.
inline void set_steps(std::int64_t epoch, const Options& options, Accumulator& optimizer) {
  const auto entry = options.accumulate.find(epoch);
  if (entry == options.accumulate.end() || (epoch == 0 && entry->second == 1)) return;
  optimizer.set_steps(entry->second);
  fmt::print("{}\n", optimizer.description());
}

/// Trains and evaluates, epoch by epoch.
inline ga::Evaluation train_by_hand(Setup& setup, const Options& options) {
  const auto learned = training_objective(setup, options);
  Accumulator optimizer(*setup.optimizer);
  ga::AmpScaler scaler({.enabled = options.amp == "fp16"});  // if disabled, it only steps
  ga::Replicas replicas(setup.group, setup.model, optimizer, {.shard = options.shard});
  ga::ProgressLine line;
  std::int64_t done = 0;
  const auto all = static_cast<double>(options.epochs * setup.batches.rows());
  const auto progress = [&](const ga::data::Batch& batch, const ga::Loss& loss) {
    done += batch.target.size(0) * setup.group.world_size();
    line.update(static_cast<double>(done) / all, done, [&] {  // reads the loss from the device only to print it
      return fmt::format("update {} | loss {:.4f}", optimizer.updates(), loss.mean.item<double>());
    });
  };
  ga::Evaluation test;
  for (std::int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    set_steps(epoch, options, optimizer);
    print_heading(epoch);
    train_epoch(setup, learned, optimizer, scaler, replicas, options, progress);
    test = evaluate(setup, options);
    line.clear();
    print_results(test);
  }
  print_steps(learned);
  return test;
}

/// Trains a new model, and prints time and memory. Returns the exit status. Memory excludes the data set, which exists
/// already.
inline int run_by_hand(const Options& options, const Dataset& dataset, const ga::ProcessGroup& group) {
  const ga::MemoryMeter meter;
  const auto start = std::chrono::steady_clock::now();
  Setup setup(options, dataset, group);
  train_by_hand(setup, options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("Done\n{:.1f} seconds, {} samples/second, peak memory {:.1f} MB beyond the data set\n", seconds.count(),
             ga::rate_text(static_cast<double>(options.epochs * setup.batches.rows()) / seconds.count()),
             static_cast<double>(meter.peak_bytes()) / 1e6);
  return 0;
}

}  // namespace fashion_mnist
