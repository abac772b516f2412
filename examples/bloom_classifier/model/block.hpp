// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <memory>
#include <utility>

#include "attention.hpp"
#include "config.hpp"

namespace bloom {

/// Two linear layers with GELU (tanh approximation) between them.
class BloomMLPImpl : public torch::nn::Module {
 public:
  explicit BloomMLPImpl(const BloomConfig& config)
      : dense_h_to_4h(register_module("dense_h_to_4h", torch::nn::Linear(config.hidden_size, 4 * config.hidden_size))),
        dense_4h_to_h(register_module("dense_4h_to_h", torch::nn::Linear(4 * config.hidden_size, config.hidden_size))) {
  }

  at::Tensor forward(const at::Tensor& hidden) {
    return dense_4h_to_h->forward(at::gelu(dense_h_to_4h->forward(hidden), "tanh"));
  }

  torch::nn::Linear dense_h_to_4h, dense_4h_to_h;
};
TORCH_MODULE(BloomMLP);

/// One layer: attention and MLP, each on a normalized copy, and added to the input (or to that copy).
class BloomBlockImpl : public torch::nn::Module {
 public:
  BloomBlockImpl(const BloomConfig& config, std::shared_ptr<AlibiChannels> alibi)
      : input_layernorm(register_module("input_layernorm", make_layer_norm(config))),
        self_attention(register_module("self_attention", BloomAttention(config, std::move(alibi)))),
        post_attention_layernorm(register_module("post_attention_layernorm", make_layer_norm(config))),
        mlp(register_module("mlp", BloomMLP(config))),
        adds_normalised_(config.apply_residual_connection_post_layernorm),
        dropout_(config.hidden_dropout) {}

  /// Maps [n, t, hidden_size] to the same shape. `lengths`: of packed rows.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& lengths = {}) {
    const auto normalised = input_layernorm->forward(hidden);
    return add_mlp(add(self_attention->forward(normalised, lengths), adds_normalised_ ? normalised : hidden));
  }

  /// Computes only one token of each row, `index` [n]: [n, t, hidden_size] to [n, 1, hidden_size].
  at::Tensor forward_at(const at::Tensor& hidden, const at::Tensor& index) {
    const auto normalised = input_layernorm->forward(hidden);
    const auto residual = (adds_normalised_ ? normalised : hidden).take_along_dim(index.view({-1, 1, 1}), 1);
    return add_mlp(add(self_attention->forward_at(normalised, index), residual));
  }

  /// Computes only the last token of each packed row: [1, all tokens, hidden_size] to [1, n, hidden_size].
  at::Tensor forward_at_ends(const at::Tensor& hidden, const at::Tensor& lengths) {
    const auto normalised = input_layernorm->forward(hidden);
    const auto ends = (lengths.cumsum(0) - 1).to(hidden.device());
    const auto residual = (adds_normalised_ ? normalised : hidden).index_select(1, ends);
    return add_mlp(add(self_attention->forward_at_ends(normalised, lengths), residual));
  }

  static torch::nn::LayerNorm make_layer_norm(const BloomConfig& config) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_epsilon));
  }

  torch::nn::LayerNorm input_layernorm;
  BloomAttention self_attention;
  torch::nn::LayerNorm post_attention_layernorm;
  BloomMLP mlp;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

 private:
  at::Tensor add(const at::Tensor& output, const at::Tensor& residual) const {
    return residual + at::dropout(output, dropout_, is_training());
  }

  at::Tensor add_mlp(const at::Tensor& hidden) {
    const auto normalised = post_attention_layernorm->forward(hidden);
    return add(mlp->forward(normalised), adds_normalised_ ? normalised : hidden);
  }

  bool adds_normalised_;
  double dropout_;
};
TORCH_MODULE(BloomBlock);

}  // namespace bloom
