// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/checkpointed_sequential.hpp>
#include <optional>
#include <vector>

#include "idx.hpp"

namespace fashion_mnist {

namespace ga = gradaccum;

inline constexpr std::int64_t hidden_size = 512;

/// A multilayer perceptron, 784-512-…-512-10 with `depth` hidden layers, from images [N, 28, 28] to logits [N, 10].
inline torch::nn::Sequential make_layers(std::int64_t depth) {
  // The last layer draws its random numbers first, as when g++ compiles Sequential(Flatten(), Linear(…), …).
  std::vector<torch::nn::Linear> linear{torch::nn::Linear(hidden_size, class_count)};
  for (auto layer = depth; layer > 0; --layer)
    linear.emplace_back(layer == 1 ? image_side * image_side : hidden_size, hidden_size);

  torch::nn::Sequential layers;
  layers->push_back(torch::nn::Flatten());
  for (auto layer = linear.rbegin(); layer != linear.rend(); ++layer) {
    if (layer != linear.rbegin()) layers->push_back(torch::nn::ReLU());
    layers->push_back(*layer);
  }
  return layers;
}

/// Returns the number of modules in make_layers(depth).
inline std::int64_t module_count(std::int64_t depth) { return 2 * depth + 2; }

/// The layers of make_layers; with `checkpoint`, some of them are recomputed in backward to save memory.
class NetworkImpl : public torch::nn::Module {
 public:
  explicit NetworkImpl(std::int64_t depth,
                       const std::optional<ga::CheckpointedSequentialOptions>& checkpoint = std::nullopt)
      : layers_(register_module("layers", make_layers(depth))) {
    if (checkpoint) checkpointed_ = ga::CheckpointedSequential(layers_, *checkpoint);  // shares the modules
  }

  at::Tensor forward(const at::Tensor& images) {
    return checkpointed_ ? checkpointed_->forward(images) : layers_->forward(images);
  }
  ga::CheckpointPlan plan() const { return checkpointed_->plan(); }

 private:
  torch::nn::Sequential layers_;
  ga::CheckpointedSequential checkpointed_ = nullptr;
};
TORCH_MODULE(Network);

}  // namespace fashion_mnist
