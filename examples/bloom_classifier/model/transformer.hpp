// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/embedding.hpp>

#include <torch/torch.h>

#include <cstdint>
#include <memory>

#include "block.hpp"
#include "config.hpp"

namespace bloom {

namespace ga = gradaccum;

/// Embeddings, blocks and the final normalization.
class BloomModelImpl : public torch::nn::Module {
 public:
  explicit BloomModelImpl(const BloomConfig& config)
      : word_embeddings(
            register_module("word_embeddings", torch::nn::Embedding(config.vocab_size, config.hidden_size))),
        word_embeddings_layernorm(
            register_module("word_embeddings_layernorm", BloomBlockImpl::make_layer_norm(config))),
        h(register_module("h", torch::nn::ModuleList())),
        ln_f(register_module("ln_f", BloomBlockImpl::make_layer_norm(config))) {
    const auto alibi = std::make_shared<AlibiChannels>(config.n_head, config.head_dim());
    for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
      last_block_ = BloomBlock(config, alibi);
      h->push_back(last_block_);
      if (layer + 1 < config.n_layer) blocks_->push_back(last_block_);  // shared, not copied
    }
  }

  /// Maps ids [n, t] to the hidden states [n, hidden_size] of one token of each row, `index` [n].
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& index) {
    const auto hidden = all_but_the_last(ids, /*lengths=*/{});
    return ln_f->forward(last_block_->forward_at(hidden, index)).squeeze(1);  // only one token is needed
  }

  /// Maps ids [n, t] to the hidden states [n, t, hidden_size] of all tokens, for a language model.
  at::Tensor all_tokens(const at::Tensor& ids) {
    return ln_f->forward(last_block_->forward(all_but_the_last(ids, /*lengths=*/{})));
  }

  /// Maps packed rows of ids, [1, all tokens], concatenated without padding, and their `lengths`, int64 [n] on the CPU,
  /// to the hidden states [n, hidden_size] of the last token of each row. Only attention uses `lengths`.
  at::Tensor forward_packed(const at::Tensor& ids, const at::Tensor& lengths) {
    const auto hidden = all_but_the_last(ids, lengths);
    return ln_f->forward(last_block_->forward_at_ends(hidden, lengths)).squeeze(0);
  }

  /// Makes the embedding's gradient sparse, with only the used rows, for optimizers that update rows.
  void sparse_embedding_gradient(bool sparse) { sparse_ = sparse; }

  /// See BloomForSequenceClassification.
  void checkpoint_blocks(const ga::CheckpointedSequentialOptions& options) {
    checkpointed_ = ga::CheckpointedSequential(blocks_, options);
  }
  const ga::CheckpointedSequential& checkpointed_blocks() const { return checkpointed_; }
  ga::CheckpointPlan checkpoint_plan() const {
    TORCH_CHECK(checkpointed_, "BloomModel: checkpoint_blocks must be called before checkpoint_plan");
    return checkpointed_->plan();
  }

  torch::nn::Embedding word_embeddings;
  torch::nn::LayerNorm word_embeddings_layernorm;
  torch::nn::ModuleList h;
  torch::nn::LayerNorm ln_f;

 private:
  at::Tensor all_but_the_last(const at::Tensor& ids, const at::Tensor& lengths) {
    const auto embedded = ga::embedding(ids, word_embeddings->weight, {.sparse = sparse_});
    auto hidden = word_embeddings_layernorm->forward(embedded);
    if (checkpointed_) return checkpointed_->forward(hidden, lengths);
    for (auto& block : *blocks_) hidden = block.forward(hidden, lengths);
    return hidden;
  }

  bool sparse_ = false;
  torch::nn::Sequential blocks_;  // all but the last
  BloomBlock last_block_ = nullptr;
  ga::CheckpointedSequential checkpointed_ = nullptr;
};
TORCH_MODULE(BloomModel);

}  // namespace bloom
