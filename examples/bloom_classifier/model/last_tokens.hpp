// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>

namespace bloom {

/// Rows with padding at the end, which causal attention needs no mask for, because no token attends to later ones.
struct TokensFirst {
  at::Tensor ids;   // [n, t]
  at::Tensor last;  // [n]: index of the last token that is not padding; 0 if there is none

  TokensFirst(const at::Tensor& input_ids, const at::Tensor& attention_mask, std::optional<std::int64_t> pad_token_id)
      : ids(input_ids) {
    auto is_token = pad_token_id ? ids.ne(*pad_token_id) : torch::ones_like(ids, torch::kBool);
    if (attention_mask.defined()) {
      const auto masked = attention_mask.eq(0);
      const auto order = at::argsort(masked.to(torch::kByte), /*stable=*/true);  // tokens keep their order
      ids = ids.gather(1, order);
      is_token = is_token.logical_and(masked.logical_not()).gather(1, order);
    }
    last = (torch::arange(ids.size(1), ids.options()) * is_token).amax(1);
  }
};

}  // namespace bloom
