// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace harness {

/// Attention and a multilayer perceptron, each after a LayerNorm and with a residual connection, for x [batch, tokens,
/// width].
struct TransformerBlockImpl : torch::nn::Module {
  TransformerBlockImpl(std::int64_t width, std::int64_t heads)
      : heads(heads),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        projection(register_module("projection", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  at::Tensor forward(at::Tensor x) {
    x = x + projection(attention(qkv(norm1(x))));
    return x + down(torch::gelu(up(norm2(x))));
  }

  at::Tensor attention(const at::Tensor& qkv) const {
    const auto batch = qkv.size(0), tokens = qkv.size(1), width = qkv.size(2) / 3;
    const auto parts = qkv.view({batch, tokens, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    return mixed.transpose(1, 2).reshape({batch, tokens, width});
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, projection, up, down;
};
TORCH_MODULE(TransformerBlock);

struct Chain {
  std::string name;
  torch::nn::Sequential stages;
  at::Tensor input;
};

inline Chain transformer_chain() {
  torch::manual_seed(0);
  torch::nn::Sequential stages;
  for (int i = 0; i < 24; ++i) stages->push_back(TransformerBlock(256, 8));
  return {"24 transformer blocks of width 256, 2 x 128 tokens", stages, torch::randn({2, 128, 256})};
}

/// Makes layers that differ in width, in time per byte, and in kept memory.
inline Chain heterogeneous_chain() {
  torch::manual_seed(0);
  const std::vector<std::int64_t> widths = {256, 512, 128, 384, 256, 448, 192, 320, 512,
                                            256, 384, 128, 512, 320, 192, 448, 256};
  torch::nn::Sequential stages;
  for (std::size_t i = 0; i < 32; ++i) {
    const auto in = widths[i % 16], out = widths[i % 16 + 1];
    stages->push_back(torch::nn::Linear(in, out));
    if (i % 3 != 2) stages->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({out})));
    if (i % 2 == 0)
      stages->push_back(torch::nn::GELU());
    else
      stages->push_back(torch::nn::ReLU());
  }
  return {"32 layers of width 128 to 512, 512 rows", stages, torch::randn({512, 256})};
}

}  // namespace harness
