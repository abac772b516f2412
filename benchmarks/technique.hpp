// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "language_model.hpp"

namespace harness {

enum class OptimizerKind { torch_adamw, adamw, adamw8bit, adafactor };

/// A way to train. The default is LibTorch's plain loop.
struct Technique {
  std::string name;
  OptimizerKind optimizer = OptimizerKind::adamw;
  std::int64_t micro_batches = 1;
  double activations = 1;  ///< the blocks' budget, relative to their memory in the plain loop, but at least the minimum
                           ///< of any schedule; 1: no checkpoints
  bool autocast = false;
  bool bfloat16_parameters = false;  ///< stochastically rounded
  bool in_backward = false;
};

struct TrainingSettings {
  ModelShape shape;
  std::int64_t rows = 8, length = 128;
  double learning_rate = 0, adafactor_learning_rate = 0;
  std::int64_t plain_activations = 0;  ///< bytes that the blocks hold in the plain loop
};

/// Returns the peak bytes of these blocks in forward and backward, without input, output and gradients of parameters.
inline std::int64_t peak_bytes(const std::function<at::Tensor(at::Tensor)>& blocks,
                               const std::vector<at::Tensor>& parameters, const at::Tensor& input) {
  const auto gradient = torch::ones_like(input);
  const gradaccum::detail::AllocationScope scope("peak_bytes: must not run inside LibTorch's profiler");
  std::vector<std::pair<at::Tensor, unsigned>> hooks;
  for (auto& parameter : parameters)
    hooks.emplace_back(parameter, parameter.register_hook([&](const at::Tensor& g) { scope->exclude(g); }));
  {
    const auto output = blocks(input);
    scope->exclude(output);
    output.backward(gradient);
  }
  for (auto& [parameter, hook] : hooks) parameter.remove_hook(hook);
  for (auto parameter : parameters) parameter.mutable_grad().reset();
  return scope->between(0, scope->now()).peak;
}

inline at::Tensor input_of_blocks(const TrainingSettings& settings, std::int64_t rows) {
  return torch::randn({rows, settings.length, settings.shape.width}).requires_grad_();
}

/// Trains a model with a technique.
class Training {
 public:
  Training(const Technique& technique, const TrainingSettings& settings)
      : technique_(technique), settings_(settings), model_(seeded(settings)) {
    TORCH_CHECK(settings.rows % technique.micro_batches == 0, technique.name, ": the batch must be a multiple of ",
                technique.micro_batches, " sequences, got ", settings.rows);
    if (technique.bfloat16_parameters) model_->to(torch::kBFloat16);
    if (technique.activations < 1) checkpoint();
    set_optimizer();
  }

  /// Makes one update from a batch, without `clear()`. Returns the mean loss.
  double step(const Tokens& batch) {
    double sum = 0;
    const auto rows = batch.input.size(0) / technique_.micro_batches;
    for (std::int64_t i = 0; i < technique_.micro_batches; ++i) {
      const auto micro_batch = batch.rows(i * rows, rows);
      const auto loss = loss_of(micro_batch);
      sum += loss.item<double>();
      advance_({loss, micro_batch.target.numel()});
    }
    TORCH_CHECK(std::isfinite(sum), technique_.name, ": the loss is ", sum);
    return sum / static_cast<double>(technique_.micro_batches);
  }
  /// Clears the gradients.
  void clear() { clear_(); }

  /// Returns the mean loss in float32. Call it last, because it changes the model.
  double evaluate(const std::vector<Tokens>& batches) {
    torch::NoGradGuard no_grad;
    model_->to(torch::kFloat);
    double sum = 0;
    for (auto& batch : batches) sum += model_->loss(batch).item<double>();
    TORCH_CHECK(std::isfinite(sum), technique_.name, ": the loss after training is ", sum);
    return sum / static_cast<double>(batches.size());
  }

  std::int64_t parameters() const {
    std::int64_t count = 0;
    for (auto& parameter : model_->parameters()) count += parameter.numel();
    return count;
  }
  std::int64_t largest_gradient() const {
    std::size_t bytes = 0;
    for (auto& parameter : model_->parameters()) bytes = std::max(bytes, parameter.nbytes());
    return static_cast<std::int64_t>(bytes);
  }

 private:
  static LanguageModel seeded(const TrainingSettings& settings) {
    torch::manual_seed(0);
    return LanguageModel(settings.shape, settings.length);
  }

  gradaccum::Autocast autocast() const {
    return gradaccum::Autocast(torch::kCPU, torch::kBFloat16, /*enabled=*/technique_.autocast);
  }

  at::Tensor loss_of(const Tokens& batch) {
    const auto scope = autocast();
    return model_->loss(batch);
  }

  /// Checkpoints within the technique's budget, and checks by measurement that the budget is kept.
  void checkpoint() {
    const auto forward = [this](const at::Tensor& x) {
      const auto scope = autocast();
      return (*model_->checkpointed)->forward(x);
    };
    auto input = input_of_blocks(settings_, settings_.rows / technique_.micro_batches);
    if (technique_.bfloat16_parameters) input = input.detach().to(torch::kBFloat16).requires_grad_();
    model_->checkpoint(settings_.plain_activations);
    forward(input);
    const auto least = (*model_->checkpointed)->plan().least_bytes;
    const auto share = technique_.activations * static_cast<double>(settings_.plain_activations);
    const auto budget = std::max(least, static_cast<std::int64_t>(share));
    model_->checkpoint(budget);
    forward(input);  // plans, and measures each block with gradients, which the budget excludes
    const auto taken = peak_bytes(forward, model_->blocks->parameters(), input);
    TORCH_CHECK(taken <= budget, technique_.name, ": a budget of ", budget, " bytes was exceeded: ", taken);
  }

  void set_optimizer() {
    const auto lr = settings_.learning_rate;
    switch (technique_.optimizer) {
      case OptimizerKind::torch_adamw:
        return plain_loop(torch::optim::AdamWOptions(lr));
      case OptimizerKind::adamw:
        return use<gradaccum::optim::AdamW>(gradaccum::optim::AdamWOptions(lr));
      case OptimizerKind::adamw8bit:
        return use<gradaccum::optim::AdamW8bit>(gradaccum::optim::AdamW8bitOptions(lr));
      case OptimizerKind::adafactor:
        return use<gradaccum::optim::Adafactor>(gradaccum::optim::AdafactorOptions(settings_.adafactor_learning_rate));
    }
  }

  void plain_loop(const torch::optim::AdamWOptions& options) {
    const auto optimizer = std::make_shared<torch::optim::AdamW>(model_->parameters(), options);
    advance_ = [optimizer](const gradaccum::Loss& loss) {
      loss.mean.backward();
      optimizer->step();
    };
    clear_ = [optimizer] { optimizer->zero_grad(); };
  }

  template <class Optimizer, class Options>
  void use(const Options& options) {
    const auto optimizer = std::make_shared<Optimizer>(model_->parameters(), options);
    if (technique_.bfloat16_parameters) optimizer->stochastic_rounding(/*seed=*/0);
    const auto window = std::make_shared<gradaccum::GradAccumulator<Optimizer>>(
        *optimizer,
        gradaccum::GradAccumulatorOptions{.steps = technique_.micro_batches, .in_backward = technique_.in_backward});
    advance_ = [optimizer, window](const gradaccum::Loss& loss) {
      window->backward(loss);
      window->step();
    };
    clear_ = [window] { window->zero_grad(); };
  }

  Technique technique_;
  TrainingSettings settings_;
  LanguageModel model_;
  std::function<void(const gradaccum::Loss&)> advance_;
  std::function<void()> clear_;
};

/// Returns the bytes that the blocks hold in the plain loop.
inline std::int64_t plain_activations(const TrainingSettings& settings) {
  LanguageModel model(settings.shape, settings.length);
  return peak_bytes([&](const at::Tensor& x) { return model->blocks->forward(x); }, model->blocks->parameters(),
                    input_of_blocks(settings, settings.rows));
}

}  // namespace harness
