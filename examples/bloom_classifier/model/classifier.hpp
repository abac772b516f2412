// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <utility>

#include "config.hpp"
#include "last_tokens.hpp"
#include "transformer.hpp"

namespace bloom {

/// Initializes as transformers does: matrices normal, biases zero; normalizations are already 1 and 0.
inline void init_weights(torch::nn::Module& model, double standard_deviation) {
  for (auto& module : model.modules(/*include_self=*/false)) {
    if (auto* linear = module->as<torch::nn::Linear>()) {
      torch::nn::init::normal_(linear->weight, 0, standard_deviation);
      if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
    } else if (auto* embedding = module->as<torch::nn::Embedding>()) {
      torch::nn::init::normal_(embedding->weight, 0, standard_deviation);
    }
  }
}

/// transformers' BloomForSequenceClassification: its parameters' names, its scores, its gradients.
///
///     bloom::BloomForSequenceClassification model(bloom::BloomConfig::from_file("bloom/config.json"));
///     ga::io::load_weights(model, "bloom/model.safetensors");
///     model->checkpoint_blocks({.memory_budget = 512 * ga::MiB});      // if you like: less memory, more time
///     auto loss = torch::cross_entropy_loss(model->forward(input_ids, attention_mask), labels);
///
/// A new model has random weights.
class BloomForSequenceClassificationImpl : public torch::nn::Module {
 public:
  explicit BloomForSequenceClassificationImpl(BloomConfig config) : config_(checked(std::move(config))) {
    transformer = register_module("transformer", BloomModel(config_));
    score = register_module(
        "score", torch::nn::Linear(torch::nn::LinearOptions(config_.hidden_size, config_.num_labels).bias(false)));
    init_weights(*this, config_.initializer_range);
  }

  /// Maps ids [n, t] to the scores [n, num_labels] at the last token that is not padding.
  ///
  /// `attention_mask` [n, t] is 0 for hidden tokens, which are padding at the left or right. Positions are counted
  /// without them. Without a mask no token is hidden, and trailing `pad_token_id` tokens are not the last.
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& attention_mask = {}) {
    TORCH_CHECK(input_ids.dim() == 2 && input_ids.scalar_type() == torch::kLong && input_ids.numel() > 0,
                "BloomForSequenceClassification: input_ids must be int64 [n, t], with a token at least, got ",
                input_ids.scalar_type(), " ", input_ids.sizes());
    TORCH_CHECK(!attention_mask.defined() || attention_mask.sizes() == input_ids.sizes(),
                "BloomForSequenceClassification: attention_mask must have the shape of input_ids, ", input_ids.sizes(),
                ", got ", attention_mask.sizes());
    const TokensFirst tokens(input_ids, attention_mask, config_.pad_token_id);
    return score->forward(transformer->forward(tokens.ids, tokens.last));
  }

  /// Maps rows of ids, concatenated without padding to [all tokens], and their `lengths`, int64 [n] on the CPU, to the
  /// scores [n, num_labels]: equal to those of `forward`, up to rounding, without computing padding. Attention runs row
  /// by row, which is fast for few long rows on a CPU and slow for many short ones on a GPU.
  at::Tensor forward_packed(const at::Tensor& input_ids, const at::Tensor& lengths) {
    TORCH_CHECK(input_ids.dim() == 1 && input_ids.scalar_type() == torch::kLong,
                "BloomForSequenceClassification: packed input_ids must be int64 [all tokens], got ",
                input_ids.scalar_type(), " ", input_ids.sizes());
    TORCH_CHECK(
        lengths.dim() == 1 && lengths.scalar_type() == torch::kLong && lengths.is_cpu() &&
            lengths.gt(0).all().item<bool>() && lengths.sum().item<std::int64_t>() == input_ids.size(0),
        "BloomForSequenceClassification: lengths must be int64 [n] on the CPU, each above 0, that add up to the "
        "packed tokens, ",
        input_ids.size(0));
    return score->forward(transformer->forward_packed(input_ids.unsqueeze(0), lengths.contiguous()));
  }

  /// Recomputes blocks in backward to save memory, in segments or within a budget of bytes. The last block is excluded,
  /// because it computes one token per row and keeps little: `n_layer` must be 2 or more.
  void checkpoint_blocks(const ga::CheckpointedSequentialOptions& options) { transformer->checkpoint_blocks(options); }
  /// Returns the checkpointed blocks, for `ga::FitMemory`.
  const ga::CheckpointedSequential& checkpointed_blocks() const { return transformer->checkpointed_blocks(); }
  ga::CheckpointPlan checkpoint_plan() const { return transformer->checkpoint_plan(); }

  const BloomConfig& config() const { return config_; }

  BloomModel transformer = nullptr;
  torch::nn::Linear score = nullptr;

 private:
  static BloomConfig checked(BloomConfig config) {
    config.check();
    return config;
  }

  BloomConfig config_;
};
TORCH_MODULE(BloomForSequenceClassification);

}  // namespace bloom
