// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/gradients.hpp>
#include <string>
#include <utility>

/// The networks of benchmark_compiled_step, the same as in python/compiled_step.py.
namespace compiled_networks {

namespace ga = gradaccum;
namespace nn = torch::nn;

using Batch = std::pair<at::Tensor, at::Tensor>;

template <class Model>
struct Task {
  std::string name, title;
  Model model;
  Batch batch;
  bool bfloat16 = false;

  static ga::Loss objective(Model& model, const Batch& batch) {
    return {torch::cross_entropy_loss(model->forward(batch.first), batch.second), batch.second.size(0)};
  }
  Task copy() const {
    auto other = *this;
    other.model = Model(std::dynamic_pointer_cast<typename Model::ContainedType>(model->clone()));
    return other;
  }
};

struct PerceptronImpl : nn::Cloneable<PerceptronImpl> {
  PerceptronImpl(std::int64_t inputs, std::int64_t hidden) : inputs_(inputs), hidden_(hidden) { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(inputs_, hidden_));
    second = register_module("second", nn::Linear(hidden_, hidden_));
    third = register_module("third", nn::Linear(hidden_, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return third(torch::relu(second(torch::relu(first(x))))); }
  nn::Linear first = nullptr, second = nullptr, third = nullptr;

 private:
  std::int64_t inputs_, hidden_;
};
TORCH_MODULE(Perceptron);

struct ConvolutionalImpl : nn::Cloneable<ConvolutionalImpl> {
  ConvolutionalImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)));
    first_norm = register_module("first_norm", nn::BatchNorm2d(16));
    second_norm = register_module("second_norm", nn::BatchNorm2d(32));
    last = register_module("last", nn::Linear(32 * 49, 10));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = torch::max_pool2d(torch::relu(first_norm(first(x))), {2, 2});
    return last(torch::max_pool2d(torch::relu(second_norm(second(hidden))), {2, 2}).flatten(1));
  }
  nn::Conv2d first = nullptr, second = nullptr;
  nn::BatchNorm2d first_norm = nullptr, second_norm = nullptr;
  nn::Linear last = nullptr;
};
TORCH_MODULE(Convolutional);

struct BlockImpl : nn::Cloneable<BlockImpl> {
  BlockImpl(std::int64_t width, double dropout) : width_(width), rate_(dropout) { reset(); }
  void reset() override {
    attention_norm = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({width_})));
    query_key_value = register_module("query_key_value", nn::Linear(width_, 3 * width_));
    dense = register_module("dense", nn::Linear(width_, width_));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width_})));
    up = register_module("up", nn::Linear(width_, 4 * width_));
    down = register_module("down", nn::Linear(4 * width_, width_));
    dropout = register_module("dropout", nn::Dropout(rate_));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto after = x + dropout(attention(attention_norm(x)));
    return after + dropout(down(torch::gelu(up(norm(after)), "tanh")));
  }
  at::Tensor attention(const at::Tensor& x) {
    const auto heads = width_ / 32;
    const auto parts = query_key_value(x).view({x.size(0), x.size(1), 3, heads, 32}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    return dense(mixed.transpose(1, 2).flatten(2));
  }
  nn::LayerNorm attention_norm = nullptr, norm = nullptr;
  nn::Linear query_key_value = nullptr, dense = nullptr, up = nullptr, down = nullptr;
  nn::Dropout dropout = nullptr;

 private:
  std::int64_t width_;
  double rate_;
};
TORCH_MODULE(Block);

struct TransformerImpl : nn::Cloneable<TransformerImpl> {
  TransformerImpl(std::int64_t width, int layers, double dropout) : width_(width), layers_(layers), rate_(dropout) {
    reset();
  }
  void reset() override {
    embedding = register_module("embedding", nn::Embedding(1000, width_));
    blocks = register_module("blocks", nn::Sequential());
    for (int i = 0; i < layers_; ++i) blocks->push_back(Block(width_, rate_));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width_})));
    score = register_module("score", nn::Linear(nn::LinearOptions(width_, 2).bias(false)));
  }
  at::Tensor forward(const at::Tensor& ids) { return score(norm(blocks->forward(embedding(ids))).select(1, -1)); }
  nn::Embedding embedding = nullptr;
  nn::Sequential blocks = nullptr;
  nn::LayerNorm norm = nullptr;
  nn::Linear score = nullptr;

 private:
  std::int64_t width_;
  int layers_;
  double rate_;
};
TORCH_MODULE(Transformer);

inline Task<Perceptron> tiny() {
  torch::manual_seed(0);
  return {
      "tiny", "8-8-8-10, 16 rows", Perceptron(8, 8), {torch::randn({16, 8}), torch::randint(10, {16}, torch::kLong)}};
}
inline Task<Perceptron> perceptron() {
  torch::manual_seed(0);
  return {"perceptron",
          "784-512-512-10, 64 rows",
          Perceptron(784, 512),
          {torch::randn({64, 784}), torch::randint(10, {64}, torch::kLong)}};
}
inline Task<Convolutional> convolutional() {
  torch::manual_seed(0);
  return {"convolutional",
          "two convolutions with BatchNorm, 32 images of 28 x 28",
          Convolutional(),
          {torch::randn({32, 1, 28, 28}), torch::randint(10, {32}, torch::kLong)}};
}
inline Task<Transformer> transformer(const std::string& name, std::int64_t width, int layers, std::int64_t tokens,
                                     double dropout, bool bfloat16) {
  torch::manual_seed(0);
  auto title = "a transformer, width " + std::to_string(width) + ", " + std::to_string(layers) + " layers, 8 x " +
               std::to_string(tokens) + " tokens" + (dropout > 0 ? ", dropout" : "") + (bfloat16 ? ", bfloat16" : "");
  return {name,
          std::move(title),
          Transformer(width, layers, dropout),
          {torch::randint(1000, {8, tokens}, torch::kLong), torch::randint(2, {8}, torch::kLong)},
          bfloat16};
}

}  // namespace compiled_networks
