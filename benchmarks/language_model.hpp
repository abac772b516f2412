// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/checkpointed_sequential.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "chains.hpp"

namespace harness {

struct ModelShape {
  std::string name;
  std::int64_t width, heads, blocks, vocabulary;
};

struct Tokens {
  at::Tensor input, target;  ///< [rows, length], int64; the target is the token that follows

  Tokens rows(std::int64_t first, std::int64_t count) const {
    return {input.narrow(0, first, count), target.narrow(0, first, count)};
  }
};

/// A synthetic language to learn: 256 words, each followed by one of four, half of the time by the first. The best
/// possible loss is the entropy of that choice.
class MarkovChain {
 public:
  explicit MarkovChain(std::int64_t vocabulary) {
    std::mt19937_64 random(0);
    words_.resize(vocabulary);
    for (std::int64_t word = 0; word < vocabulary; ++word) words_[word] = word;
    std::shuffle(words_.begin(), words_.end(), random);
    for (auto& followers : followers_)
      for (std::size_t i = 0; i < followers.size(); ++i) followers[i] = (random() % (states / 4)) * 4 + i;  // distinct
  }

  static double entropy() { return 1.75 * std::log(2.0); }  // of 1/2, 1/4, 1/8, 1/8

  /// Makes a batch, which depends only on its number.
  Tokens batch(std::uint64_t number, std::int64_t rows, std::int64_t length) const {
    std::mt19937_64 random(number);
    auto text = torch::empty({rows, length + 1}, torch::kLong);
    auto* word = text.mutable_data_ptr<std::int64_t>();
    for (std::int64_t row = 0; row < rows; ++row) {
      auto state = random() % states;
      for (std::int64_t i = 0; i <= length; ++i, ++word) {
        *word = words_[state];
        const auto eighth = random() % 8;
        state = followers_[state][eighth < 4 ? 0 : eighth < 6 ? 1 : eighth - 4];
      }
    }
    return {text.narrow(1, 0, length).contiguous(), text.narrow(1, 1, length).contiguous()};
  }

 private:
  static constexpr std::size_t states = 256;
  std::vector<std::int64_t> words_;
  std::array<std::array<std::size_t, 4>, states> followers_;
};

/// A decoder-only transformer, whose blocks may be checkpointed.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl(const ModelShape& shape, std::int64_t length)
      : words(register_module("words", torch::nn::Embedding(shape.vocabulary, shape.width))),
        places(register_module("places", torch::nn::Embedding(length, shape.width))),
        blocks(register_module("blocks", torch::nn::Sequential())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})))),
        head(register_module("head",
                             torch::nn::Linear(torch::nn::LinearOptions(shape.width, shape.vocabulary).bias(false)))) {
    for (std::int64_t i = 0; i < shape.blocks; ++i) blocks->push_back(TransformerBlock(shape.width, shape.heads));
  }

  /// Checkpoints the blocks within the budget, and computes the loss for 32 tokens at a time, recomputed in backward,
  /// so that only the logits of 32 tokens are in memory.
  void checkpoint(std::int64_t budget) {
    checkpointed.emplace(blocks, gradaccum::CheckpointedSequentialOptions{.memory_budget = budget});
  }

  /// Returns the mean loss over all tokens.
  at::Tensor loss(const Tokens& text) {
    const auto hidden = words(text.input) + places(torch::arange(text.input.size(1)));
    const auto target = text.target.flatten();
    if (!checkpointed) return sum_of_losses(blocks->forward(hidden).flatten(0, 1), target) / target.numel();
    const auto decoded = (*checkpointed)->forward(hidden).flatten(0, 1).split(32);
    const auto targets = target.split(32);
    const auto part = [this](const at::Tensor& x, const at::Tensor& y) { return sum_of_losses(x, y); };
    auto sum = torch::zeros({});
    for (std::size_t i = 0; i < targets.size(); ++i) sum = sum + gradaccum::checkpoint(part, decoded[i], targets[i]);
    return sum / target.numel();
  }

  at::Tensor sum_of_losses(const at::Tensor& decoded, const at::Tensor& target) {
    return torch::cross_entropy_loss(head(norm(decoded)).to(torch::kFloat), target, {}, at::Reduction::Sum);
  }

  torch::nn::Embedding words, places;
  torch::nn::Sequential blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
  std::optional<gradaccum::CheckpointedSequential> checkpointed;  // the same blocks
};
TORCH_MODULE(LanguageModel);

}  // namespace harness
