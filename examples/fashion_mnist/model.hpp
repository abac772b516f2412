// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dataset.hpp"
#include "options.hpp"

/// Defines what both loops train: the network, its loss, the optimizer and the batches.
namespace fashion_mnist {

inline constexpr std::int64_t hidden_size = 512;

/// A multilayer perceptron, 784-512-…-512-10 with `depth` hidden layers, from images [N, 28, 28] to logits [N, 10].
inline torch::nn::Sequential make_layers(std::int64_t depth) {
  torch::nn::Sequential layers{torch::nn::Flatten()};
  auto inputs = image_side * image_side;
  for (std::int64_t layer = 0; layer < depth; ++layer) {
    layers->push_back(torch::nn::Linear(inputs, hidden_size));
    layers->push_back(torch::nn::ReLU());
    inputs = hidden_size;
  }
  layers->push_back(torch::nn::Linear(inputs, class_count));
  return layers;
}

/// The layers of make_layers; within `checkpoint_bytes`, some of them are recomputed in backward. 0: without a limit.
class NetworkImpl : public torch::nn::Module {
 public:
  explicit NetworkImpl(std::int64_t depth, std::int64_t checkpoint_bytes = 0)
      : layers_(register_module("layers", make_layers(depth))) {
    if (checkpoint_bytes > 0)
      checkpointed_ = ga::CheckpointedSequential(layers_, {.memory_budget = checkpoint_bytes});  // shares the modules
  }

  at::Tensor forward(const at::Tensor& images) {
    return checkpointed_ ? checkpointed_->forward(images) : layers_->forward(images);
  }

 private:
  torch::nn::Sequential layers_;
  ga::CheckpointedSequential checkpointed_ = nullptr;
};
TORCH_MODULE(Network);

/// Returns a batch's loss, its number of images, and the logits for metrics.
inline ga::Loss objective(Network& model, const ga::data::Batch& batch) {
  const auto logits = model->forward(batch.data);
  return ga::Loss{torch::cross_entropy_loss(logits, batch.target), batch.target.size(0)}.with(logits, batch.target);
}

/// Makes the optimizer that --optimizer names: LibTorch's algorithms, in one pass over memory.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, std::vector<at::Tensor> of) {
  using namespace ga::optim;
  if (options.optimizer == "adamw") return std::make_unique<AdamW>(of, AdamWOptions(options.learning_rate));
  return std::make_unique<SGD>(of, SGDOptions(options.learning_rate));
}

/// Model, optimizer and data of a run. The same options give the same setup, bit for bit.
struct Setup {
  Setup(const Options& options, const Dataset& dataset, const ga::ProcessGroup& processes = {})
      : group(processes),
        model(seeded_model(options)),
        optimizer(make_optimizer(options, model->parameters())),
        batches(dataset.train.images, dataset.train.labels, for_this_rank(options, true)),
        test_batches(dataset.test.images, dataset.test.labels, {.batch_size = options.batch_size}),
        test_share(dataset.test.images, dataset.test.labels, for_this_rank(options, false)) {}

  ga::ProcessGroup group;
  Network model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  ga::data::TensorBatches batches, test_batches;
  ga::data::TensorBatches test_share;  // this rank's

 private:
  static Network seeded_model(const Options& options) {
    torch::manual_seed(static_cast<std::uint64_t>(options.seed));
    Network model(options.depth, options.checkpoint);
    model->to(options.device, options.scalar_type());
    return model;
  }
  ga::data::TensorBatchesOptions for_this_rank(const Options& options, bool shuffle) const {
    return {.batch_size = options.batch_size,
            .shuffle = shuffle,
            .seed = static_cast<std::uint64_t>(options.seed),
            .rank = group.rank(),
            .world_size = group.world_size()};
  }
};

using Objective = std::function<ga::Loss(Network&, const ga::data::Batch&)>;
using CompiledObjective = ga::CompiledStep<Network, decltype(&objective)>;
using GraphedObjective = ga::GraphedStep<Network, decltype(&objective)>;

/// Returns the objective, the compiled step that --compile names, or the step's graphs on a GPU. Graphs would keep the
/// memory that checkpoints and budgets save.
inline Objective training_objective(Setup& setup, const Options& options) {
  if (!options.compile.empty()) return CompiledObjective(setup.model, &objective, options.compile);
  if (options.graphs && options.checkpoint + options.memory_budget == 0 && !at::Device(options.device).is_cpu())
    return GraphedObjective(setup.model, &objective);
  return objective;
}

inline void print_steps(const Objective& trained) {
  if (const auto* const step = trained.target<CompiledObjective>()) fmt::print("{}", fmt::streamed(step->report()));
  if (const auto* const step = trained.target<GraphedObjective>()) fmt::print("{}", fmt::streamed(step->report()));
}

inline void print_heading(std::int64_t epoch) {
  fmt::print("Epoch {}\n-------------------------------\n", epoch + 1);
  std::fflush(stdout);  // shows lines immediately, also in a file
}

inline void print_results(const ga::Evaluation& test) {
  fmt::print("Test Results:\n Accuracy: {:.1f}%, Avg loss: {:.6f}\n\n", 100 * test["accuracy"], test["loss"]);
  std::fflush(stdout);
}

}  // namespace fashion_mnist
