// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/progress_line.hpp>
#include <gradaccum/replicas.hpp>

#include "objective.hpp"
#include "print.hpp"
#include "run_on_page.hpp"
#include "setup.hpp"

/// The first of two starting points: an ordinary LibTorch loop, with GradAccumulator around the optimizer.
namespace fashion_mnist {

using Accumulator = ga::GradAccumulator<torch::optim::Optimizer>;

/// Runs forward, in 16 bits if --amp is given. Backward stays outside, because it uses the dtypes of forward anyway.
inline ga::Loss forward(const Objective& objective, Network& model, const ga::data::Batch& batch,
                        const Options& options) {
  ga::Autocast autocast(batch.data.device(), options.autocast_type(), options.mixed_precision());
  return objective(model, batch);
}

/// Prints the progress. Reads the loss from the device only to print it.
class Progress {
 public:
  explicit Progress(std::int64_t samples) : samples_(samples) {}

  void add(const at::Tensor& loss, std::int64_t samples, const Accumulator& optimizer) {
    done_ += samples;
    line_.update(static_cast<double>(done_) / static_cast<double>(samples_), done_,
                 [&] { return fmt::format("update {} | loss {:.4f}", optimizer.updates(), loss.item<double>()); });
  }
  void clear() { line_.clear(); }

 private:
  ga::ProgressLine line_;
  std::int64_t samples_, done_ = 0;
};

/// Trains one epoch, and flushes after it.
inline void train_epoch(Setup& setup, const Objective& objective, Accumulator& optimizer, ga::AmpScaler& scaler,
                        ga::Replicas& replicas, const Options& options, Progress& progress, RunOnPage& page) {
  setup.model->train();
  for (const auto& batch : setup.batches) {
    const auto loss = forward(objective, setup.model, batch, options);
    scaler.scale(loss).backward();
    scaler.step(optimizer);  // updates when the window is full, unless float16 overflowed
    scaler.update();
    optimizer.zero_grad();  // does nothing inside a window
    progress.add(loss.mean, batch.target.size(0) * setup.group.world_size(), optimizer);
    page.add(loss.mean, optimizer.updates());
  }
  optimizer.flush();  // a shorter last window has its own mean
  scaler.update();
  page.end_window(optimizer.updates());
  while (replicas.others_continue()) {  // a rank may have a batch less than others
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
}

inline ga::Evaluation evaluate(Setup& setup, const Options& options) {
  torch::NoGradGuard no_grad;
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

/// Sets the number of accumulation steps, and prints it when it changes.
inline void set_steps(std::int64_t epoch, const AccumulationSchedule& accumulate, Accumulator& optimizer) {
  const auto steps = accumulate.steps(epoch);
  if (steps == (epoch == 0 ? 1 : accumulate.steps(epoch - 1))) return;
  optimizer.set_steps(steps);
  fmt::print("{}\n", optimizer.description());
}

inline ga::Evaluation train_by_hand(Setup& setup, const Options& options, RunOnPage page = {}) {
  const auto learned = training_objective(setup, options);
  Accumulator optimizer(*setup.optimizer, {.steps = options.accumulate.steps(0)});
  ga::AmpScaler scaler({.enabled = options.scales_loss()});  // if disabled, it only steps
  ga::Replicas replicas(setup.group, setup.model, optimizer, {.shard = options.shard});
  Progress progress(options.epochs * setup.batches.rows());
  ga::Evaluation test;
  for (std::int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    set_steps(epoch, options.accumulate, optimizer);
    print_heading(epoch);
    train_epoch(setup, learned, optimizer, scaler, replicas, options, progress, page);
    test = evaluate(setup, options);
    page.add(test, optimizer.updates());
    progress.clear();
    print_results(test);
  }
  print_steps(learned);
  return test;
}

}  // namespace fashion_mnist
