// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "alibi.hpp"
#include "config.hpp"

namespace bloom {

/// BLOOM's causal self-attention with ALiBi.
///
/// Uses LibTorch's flash attention, which needs memory for t tokens instead of t x t pairs, forward and backward. It
/// requires queries, keys and values of one width, so the values get channels, too, which are cut off afterwards. (On
/// the CPU different widths, or dropout, select the kernel that holds all pairs.)
class BloomAttentionImpl : public torch::nn::Module {
 public:
  BloomAttentionImpl(const BloomConfig& config, std::shared_ptr<AlibiChannels> alibi)
      : query_key_value(
            register_module("query_key_value", torch::nn::Linear(config.hidden_size, 3 * config.hidden_size))),
        dense(register_module("dense", torch::nn::Linear(config.hidden_size, config.hidden_size))),
        n_head_(config.n_head),
        head_dim_(config.head_dim()),
        dropout_(config.attention_dropout),
        alibi_(std::move(alibi)) {}

  /// Maps [n, t, hidden_size] to the same shape. Each token attends to itself and those before it. With `lengths` the
  /// rows are packed (see BloomModel), and each attends only within itself.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& lengths = {}) {
    std::vector<at::Tensor> contexts;
    for (const auto& row : with_channels(hidden, lengths))
      contexts.push_back(attend(row[0], row[1], row[2], /*mask=*/{}, /*is_causal=*/true));
    return output(contexts);
  }

  /// Computes only one token of each row, `index` [n]: [n, t, hidden_size] to [n, 1, hidden_size].
  at::Tensor forward_at(const at::Tensor& hidden, const at::Tensor& index) {
    const auto wide = with_channels(hidden, {}).front();
    const auto rows = index.view({-1, 1, 1, 1});
    const auto seen = torch::arange(hidden.size(1), index.options()) <= rows;  // [n, 1, 1, t]
    return output({attend(wide[0].take_along_dim(rows, 2), wide[1], wide[2], seen, /*is_causal=*/false)});
  }

  /// Computes only the last token of each packed row: [1, all tokens, hidden_size] to [1, n, hidden_size].
  at::Tensor forward_at_ends(const at::Tensor& hidden, const at::Tensor& lengths) {
    std::vector<at::Tensor> contexts;
    for (const auto& row : with_channels(hidden, lengths))
      contexts.push_back(attend(row[0].narrow(2, -1, 1), row[1], row[2], /*mask=*/{}, /*is_causal=*/false));
    return output(contexts);
  }

  torch::nn::Linear query_key_value, dense;

 private:
  /// Queries, keys and values, [n, n_head, t, head_dim + 8] each: of all rows, or of each packed one.
  std::vector<std::vector<at::Tensor>> with_channels(const at::Tensor& hidden, const at::Tensor& lengths) {
    const auto n = hidden.size(0), t = hidden.size(1);
    const auto fused = query_key_value->forward(hidden).view({n, t, n_head_, 3, head_dim_});
    const auto channels = lengths.defined() ? alibi_->packed(lengths, fused) : (*alibi_)(t, fused);
    const auto wide = at::cat({fused, channels.expand({n, -1, -1, -1, -1})}, -1);
    std::vector<std::vector<at::Tensor>> rows;
    for (const auto& row : lengths.defined() ? wide.split_with_sizes(sizes_of(lengths), 1) : std::vector{wide})
      rows.push_back(row.permute({3, 0, 2, 1, 4}).unbind());
    return rows;
  }
  at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const std::optional<at::Tensor>& mask, bool is_causal) const {
    const auto scale = 1 / std::sqrt(static_cast<double>(head_dim_));
    return at::scaled_dot_product_attention(query, key, value, mask, is_training() ? dropout_ : 0, is_causal, scale);
  }
  at::Tensor output(std::vector<at::Tensor> contexts) {
    for (auto& context : contexts) context = context.narrow(-1, 0, head_dim_).transpose(1, 2);
    return dense->forward(at::cat(contexts, 1).flatten(2));
  }

  std::int64_t n_head_, head_dim_;
  double dropout_;
  std::shared_ptr<AlibiChannels> alibi_;
};
TORCH_MODULE(BloomAttention);

}  // namespace bloom
