// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <vector>

#include "dataset.hpp"
#include "model.hpp"
#include "optimizer.hpp"
#include "options.hpp"
#include "progress_line.hpp"

namespace fashion_mnist {

namespace ga = gradaccum;
using Accumulator = ga::GradAccumulator<torch::optim::Optimizer>;

struct Evaluation {
  double accuracy = 0;  // in [0, 1]
  double loss = 0;      // mean over all images
};

struct Prediction {
  at::Tensor logits, loss;
};

struct RunResult {
  Evaluation test;
  double seconds = 0;             // training and evaluation
  double samples_per_second = 0;  // training images in that time
  std::int64_t peak_bytes = 0;    // beyond the data set: parameters, gradients, optimizer state, batches, activations
  std::vector<at::Tensor> parameters;
};

/// Forward, in 16 bits where --amp asks for it. Backward stays outside: it takes the types of forward by itself.
inline Prediction predict(torch::nn::Sequential& model, const ga::data::Batch& batch, const Options& options) {
  ga::Autocast autocast(batch.data.device(), options.autocast_type(), options.mixed_precision());
  const auto logits = model->forward(batch.data);
  return {logits, torch::cross_entropy_loss(logits, batch.target)};
}

/// One pass over the training images: the loop of any LibTorch program, and a flush after it.
inline void train_epoch(torch::nn::Sequential& model, ga::data::TensorBatches& batches, Accumulator& optimizer,
                        ga::AmpScaler& scaler, const Options& options, ProgressLine& progress) {
  model->train();
  for (const auto& batch : batches) {
    auto loss = predict(model, batch, options).loss;
    scaler.scale(loss).backward();
    scaler.step(optimizer);  // moves the parameters when the window is full, unless float16 overflowed
    scaler.update();
    optimizer.zero_grad();  // does nothing inside a window
    progress.add(loss, batch.target.size(0), optimizer.updates());
  }
  optimizer.flush();  // the last window may be shorter: it counts with its own mean
  scaler.update();
}

inline Evaluation evaluate(torch::nn::Sequential& model, ga::data::TensorBatches& batches, const Options& options) {
  torch::NoGradGuard no_grad;
  model->eval();
  RunningMean loss, accuracy;
  for (const auto& batch : batches) {
    const auto [logits, batch_loss] = predict(model, batch, options);
    const auto samples = batch.target.size(0);
    loss.add(batch_loss, samples);
    accuracy.add(logits.argmax(1).eq(batch.target).to(torch::kFloat64).mean(), samples);
  }
  return {accuracy.value(), loss.value()};
}

/// Prints the epoch's heading, and above it how many steps are accumulated wherever that changes.
inline void begin_epoch(std::int64_t epoch, const AccumulationSchedule& accumulate, Accumulator& optimizer) {
  const auto steps = accumulate.steps(epoch);
  if (steps != (epoch == 0 ? 1 : accumulate.steps(epoch - 1))) {
    optimizer.set_steps(steps);
    fmt::print("{}\n", optimizer.description());
  }
  fmt::print("Epoch {}\n-------------------------------\n", epoch + 1);
  std::fflush(stdout);  // now, also where the output is a file that somebody follows
}

inline void print_evaluation(const Evaluation& test) {
  fmt::print("Test Results:\n Accuracy: {:.1f}%, Avg loss: {:.6f}\n\n", 100 * test.accuracy, test.loss);
  std::fflush(stdout);
}

/// Trains a new model as the options say and prints how it goes. The same options give the same result, bit for bit.
inline RunResult train(const Options& options, const Dataset& dataset) {
  const auto start = std::chrono::steady_clock::now();
  ga::MemoryMeter meter;  // of this scope: the data set was there before
  torch::manual_seed(options.seed);

  auto model = make_model();
  model->to(options.device, options.scalar_type());
  const auto wrapped = make_optimizer(options.optimizer, model->parameters(), options.learning_rate);
  Accumulator optimizer(*wrapped, {.steps = options.accumulate.steps(0)});

  ga::AmpScaler scaler({.enabled = options.scales_loss()});  // if not, it leaves the loss alone and just steps

  const auto& [images, labels] = dataset.train;
  ga::data::TensorBatches batches(images, labels,
                                  {.batch_size = options.batch_size, .shuffle = true, .seed = options.seed});
  // Evaluated in batches of the same size: what fits for training fits for this too.
  ga::data::TensorBatches test_batches(dataset.test.images, dataset.test.labels, {.batch_size = options.batch_size});

  RunResult result;
  ProgressLine progress(options.epochs, images.size(0));
  for (std::int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    begin_epoch(epoch, options.accumulate, optimizer);
    progress.begin_epoch(optimizer.updates(), options.accumulate.updates(epoch, batches.size()));
    train_epoch(model, batches, optimizer, scaler, options, progress);
    result.test = evaluate(model, test_batches, options);
    progress.clear();
    print_evaluation(result.test);
  }
  fmt::print("Done\n");

  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.samples_per_second = static_cast<double>(options.epochs * images.size(0)) / result.seconds;
  result.peak_bytes = static_cast<std::int64_t>(meter.peak_bytes());
  for (const auto& parameter : model->parameters()) result.parameters.push_back(parameter.detach());
  return result;
}

inline void print_summary(const RunResult& result) {
  fmt::print("{:.1f} seconds, {:.0f} samples/second, peak memory {:.1f} MB beyond the data set\n", result.seconds,
             result.samples_per_second, static_cast<double>(result.peak_bytes) / 1e6);
}

}  // namespace fashion_mnist
