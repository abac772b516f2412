// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/loss.hpp>
#include <utility>

/// What the steps in steps/ were recorded of. Whoever changes something here runs `./bootstrap.sh oracle`.
namespace testing::compiled {

using Batch = std::pair<at::Tensor, at::Tensor>;

struct PerceptronImpl : torch::nn::Module {
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(6, 5)),
                    last = register_module("last", torch::nn::Linear(5, 3));

  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(hidden(x))); }
};
TORCH_MODULE(Perceptron);

/// A normalisation that moves, random numbers, a frozen parameter and one that nothing depends on.
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

/// A mean over the rows that counts them, with what metrics look at.
inline gradaccum::Loss counted_loss(Perceptron& net, const Batch& batch) {
  const auto output = net->forward(batch.first);
  return gradaccum::Loss{torch::cross_entropy_loss(output, batch.second), batch.second.size(0)}.with(output,
                                                                                                     batch.second);
}

/// A Tensor, for any of the networks.
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

inline Batch rows_of_six(std::int64_t rows, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return {torch::randn({rows, 6}), torch::randint(0, 3, {rows}, torch::kLong)};
}
inline Batch images(std::int64_t rows, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return {torch::randn({rows, 1, 8, 8}, torch::kDouble), torch::randint(0, 3, {rows}, torch::kLong)};
}

}  // namespace testing::compiled
