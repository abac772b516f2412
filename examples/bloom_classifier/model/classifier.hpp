// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <utility>

#include "config.hpp"
#include "last_tokens.hpp"
#include "transformer.hpp"

namespace bloom {

/// As transformers begins: matrices normal, biases zero; normalisations are 1 and 0 already.
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
/// A new one has random weights.
class BloomForSequenceClassificationImpl : public torch::nn::Module {
 public:
  explicit BloomForSequenceClassificationImpl(BloomConfig config) : config_(checked(std::move(config))) {
    transformer = register_module("transformer", BloomModel(config_));
    score = register_module(
        "score", torch::nn::Linear(torch::nn::LinearOptions(config_.hidden_size, config_.num_labels).bias(false)));
    init_weights(*this, config_.initializer_range);
  }

  /// Ids [n, t] to the scores [n, num_labels] of the last token that is not padding.
  ///
  /// `attention_mask` [n, t] is 0 where a token is not to be seen: padding, at the left or at the right. Positions are
  /// counted without it. Without a mask all tokens are seen, and those that are `pad_token_id` are not the last.
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

  /// Rows of ids, one after another without padding, [all tokens], and their `lengths`, int64 [n] on the CPU, to the
  /// scores [n, num_labels]: those of `forward` to rounding, for the time and memory of these tokens alone. Each row is
  /// attended to by itself, which few long rows on a CPU want, and many short ones on a GPU do not.
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

  /// Blocks run again in backward, for less memory: in so many segments, or within a budget of bytes. The last one, of
  /// which one token a row is computed, keeps little and is not among them: `n_layer` must be 2 or more.
  void checkpoint_blocks(const ga::CheckpointedSequentialOptions& options) { transformer->checkpoint_blocks(options); }
  /// Those that this made; for `ga::FitMemory`.
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
