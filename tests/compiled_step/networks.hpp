// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <gradaccum/gradients.hpp>
#include <gradaccum/linear_cross_entropy.hpp>

#include <cstdint>
#include <tuple>
#include <utility>

/// Networks whose steps are recorded and compiled when the tests are built.
namespace testing::compiled {

using Batch = std::pair<at::Tensor, at::Tensor>;

struct PerceptronImpl : torch::nn::Module {
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(6, 5)),
                    last = register_module("last", torch::nn::Linear(5, 3));

  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(hidden(x))); }
};
TORCH_MODULE(Perceptron);

/// Running statistics, random numbers, a frozen parameter and an unused one.
struct ConvolutionalImpl : torch::nn::Module {
  torch::nn::Conv2d convolution = register_module("convolution", torch::nn::Conv2d(1, 3, 3));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(3));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.3));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(108, 3));
  at::Tensor unused = register_parameter("unused", torch::ones({2}));

  ConvolutionalImpl() { convolution->bias.requires_grad_(false); }
  at::Tensor forward(const at::Tensor& x) { return last(dropout(torch::relu(norm(convolution(x))).flatten(1))); }
};
TORCH_MODULE(Convolutional);

/// A block of a transformer: causal attention, random numbers, and a buffer that the step changes.
struct TransformerImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(11, 16));
  torch::nn::LayerNorm attention_norm = layer_norm("attention_norm"), norm = layer_norm("norm");
  torch::nn::Linear query_key_value = linear("query_key_value", 16, 48), dense = linear("dense", 16, 16),
                    up = linear("up", 16, 32), down = linear("down", 32, 16),
                    last = register_module("last", torch::nn::Linear(16, 3));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.2));
  at::Tensor mean = register_buffer("mean", torch::zeros({16}));
  bool causal = true;

  at::Tensor forward(const at::Tensor& ids) {
    const auto x = centred(embedding(ids));
    const auto attended = x + dropout(attention(attention_norm(x)));
    const auto after = attended + dropout(down(torch::gelu(up(norm(attended)))));
    return last(after.mean(1));  // of all tokens, because a causal mask would not affect the last one
  }

 private:
  torch::nn::LayerNorm layer_norm(const char* name) {
    return register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
  }
  torch::nn::Linear linear(const char* name, std::int64_t in, std::int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  }
  at::Tensor centred(const at::Tensor& x) {
    mean.lerp_(x.detach().mean(at::IntArrayRef{0, 1}), 0.1);
    return x - mean;
  }
  at::Tensor attention(const at::Tensor& x) {
    const auto parts = query_key_value(x).unflatten(-1, {3, 2, 8}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, causal);
    return dense(mixed.transpose(1, 2).flatten(2));
  }
};
TORCH_MODULE(Transformer);

/// An LSTM, whose two biases have one gradient, over an EmbeddingBag of each row's tokens.
struct RecurrentImpl : torch::nn::Module {
  torch::nn::EmbeddingBag bag = register_module("bag", torch::nn::EmbeddingBag(11, 4));
  torch::nn::LSTM lstm = register_module(
      "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 5).num_layers(2).dropout(0.2).batch_first(true)));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(5, 3));

  at::Tensor forward(const at::Tensor& ids) {
    const auto words = bag(ids.flatten(0, 1).view({-1, 2})).view({ids.size(0), -1, 4});
    return last(std::get<0>(lstm(words)).mean(1));
  }
};
TORCH_MODULE(Recurrent);

/// LibTorch's layers of attention, which compare query, key and value on the host.
struct EncodedImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(11, 16));
  torch::nn::TransformerEncoder encoder = register_module(
      "encoder",
      torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
          torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32)),
          2)));
  torch::nn::MultiheadAttention attention = register_module("attention", torch::nn::MultiheadAttention(16, 2));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16, 3));

  at::Tensor forward(const at::Tensor& ids) {
    const auto embedded = embedding(ids).transpose(0, 1), encoded = encoder(embedded);
    return last(std::get<0>(attention(encoded, embedded, embedded)).mean(0));
  }
};
TORCH_MODULE(Encoded);

/// A model of the next word, whose table of words is its last layer, too.
struct WordsImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(200, 5));
  torch::nn::Linear dense = register_module("dense", torch::nn::Linear(5, 5));
  at::Tensor bias = register_parameter("bias", torch::randn({200}));

  at::Tensor forward(const at::Tensor& ids) { return torch::tanh(torch::dropout(dense(embedding(ids)), 0.1, true)); }
};
TORCH_MODULE(Words);

/// The loss of three words of four rows at a time. Some words do not count, others more than once.
inline gradaccum::Loss loss_by_parts(Words& net, const Batch& batch) {
  const auto& ids = batch.first;
  return gradaccum::linear_cross_entropy(net->forward(ids), net->embedding->weight, ids.roll(-1, 1),
                                         {.bias = net->bias,
                                          .weights = ids * 0.1 + 0.5,
                                          .ignore_index = 3,
                                          .label_smoothing = 0.1,
                                          .z_loss = 0.01,
                                          .memory_budget = 4 * 200 * sizeof(float) * 3 + 100,
                                          .items = 1});
}

/// A mean over the rows, with their number and the output for metrics.
inline gradaccum::Loss counted_loss(Perceptron& net, const Batch& batch) {
  const auto output = net->forward(batch.first);
  return gradaccum::Loss{torch::cross_entropy_loss(output, batch.second), batch.second.size(0)}.with(output,
                                                                                                     batch.second);
}

/// A loss as Tensor, for any of the networks.
inline at::Tensor plain_loss(auto& net, const Batch& batch) {
  return torch::cross_entropy_loss(net->forward(batch.first), batch.second);
}

inline Perceptron perceptron(std::uint64_t seed = 0) {
  torch::manual_seed(seed);
  return Perceptron();
}
inline Convolutional convolutional(std::uint64_t seed = 0) {
  torch::manual_seed(seed);
  Convolutional net;
  net->to(torch::kDouble);
  return net;
}
inline Transformer transformer(std::uint64_t seed = 0) {
  torch::manual_seed(seed);
  return Transformer();
}

inline Recurrent recurrent(std::uint64_t seed = 0) {
  torch::manual_seed(seed);
  return Recurrent();
}
inline Encoded encoded(std::uint64_t seed = 0) {
  torch::manual_seed(seed);
  return Encoded();
}

inline Words words(std::uint64_t seed = 0) {
  torch::manual_seed(seed);
  return Words();
}

inline Batch rows_of_six(std::int64_t rows, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return {torch::randn({rows, 6}), torch::randint(0, 3, {rows}, torch::kLong)};
}
inline Batch images(std::int64_t rows, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return {torch::randn({rows, 1, 8, 8}, torch::kDouble), torch::randint(0, 3, {rows}, torch::kLong)};
}
inline Batch sentences(std::int64_t rows, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return {torch::randint(0, 11, {rows, 8}, torch::kLong), torch::randint(0, 3, {rows}, torch::kLong)};
}

}  // namespace testing::compiled
