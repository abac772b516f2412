// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <utility>
#include <vector>

#include "model/classifier.hpp"

/// The fine-tuning loop of a well-known article, in LibTorch: an update of 8 reviews, one at a time, each padded to
/// 1024 tokens, the loss divided by 8, attention with its bias and mask in memory, and torch::optim::Adam.
namespace article {

inline constexpr std::int64_t reviews_of_update = 8, longest = 1024, padding = 3;

/// Reviews of random words with IMDB's distribution of lengths.
struct Reviews {
  std::vector<at::Tensor> ids;
  at::Tensor labels;

  Reviews(std::int64_t vocabulary, std::int64_t count, std::uint64_t seed, double length_scale = 1,
          at::Device device = at::kCPU)
      : labels((torch::arange(count) % 2).to(device)) {
    torch::manual_seed(static_cast<std::int64_t>(seed));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto length = length_scale * std::exp(5.495 + 0.6465 * torch::randn({}).item<double>());
      ids.push_back(
          torch::randint(4, vocabulary, {std::clamp<std::int64_t>(std::lround(length), 10, longest)}).to(device));
    }
  }

  /// Inserts two words that reveal the label: at 25 % of the positions the right one, at 5 % the other one.
  void make_telling() {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto chance = torch::rand_like(ids[i], torch::kFloat);
      const auto label = labels[static_cast<std::int64_t>(i)];
      const auto side = torch::where(chance < 0.25, label, 1 - label);
      ids[i] = torch::where(chance < 0.3, 4 + side, ids[i]);
    }
  }
};

/// Computes the scores step by step, as Hugging Face's Python does: [1, t] ids, of which `length` are not padding.
inline at::Tensor plain_scores(bloom::BloomForSequenceClassification& model, const at::Tensor& ids,
                               std::int64_t length) {
  const auto& config = model->config();
  const auto t = ids.size(1), heads = config.n_head, width = config.head_dim();
  const auto device = ids.device();
  const auto slopes = torch::pow(2.0, -8.0 / heads * torch::arange(1, heads + 1, device)).view({heads, 1, 1});
  const auto places = torch::arange(t, device).clamp_max(length - 1);
  const auto alibi = slopes * places;
  const auto unseen =
      torch::ones({t, t}, ids.options().dtype(torch::kBool)).triu(1) | (torch::arange(t, device) >= length);
  auto& body = *model->transformer;
  auto hidden = body.word_embeddings_layernorm(body.word_embeddings(ids));
  for (auto& layer : *body.h) {
    auto& block = *layer->as<bloom::BloomBlockImpl>();
    const auto fused = block.self_attention->query_key_value(block.input_layernorm(hidden));
    const auto parts = fused.view({t, heads, 3, width}).permute({2, 1, 0, 3});
    const auto scores =
        torch::baddbmm(alibi.to(parts.dtype()), parts[0], parts[1].transpose(1, 2), 1, 1 / std::sqrt(width));
    const auto weights = scores.to(torch::kFloat).masked_fill(unseen, -1e9).softmax(-1).to(parts.dtype());
    const auto context = torch::bmm(weights, parts[2]).transpose(0, 1).reshape({1, t, heads * width});
    hidden = hidden + block.self_attention->dense(context);
    hidden = hidden + block.mlp(block.post_attention_layernorm(hidden));
  }
  return model->score(body.ln_f(hidden)).select(1, length - 1);
}

/// Pads as the article does with `pads`, and trains at true lengths without it. On a GPU the article trains in float16,
/// for which LibTorch has neither autocast nor a loss scale, so the loop uses gradaccum's.
class Loop {
 public:
  Loop(const bloom::BloomConfig& config, bool pads, double learning_rate = 5e-5)
      : Loop(seeded(config), pads, /*in_float16=*/false, learning_rate) {}
  Loop(bloom::BloomForSequenceClassification trained, bool pads, bool in_float16, double learning_rate = 5e-5)
      : model(std::move(trained)),
        pads_(pads),
        in_float16_(in_float16),
        optimizer_(model->parameters(), torch::optim::AdamOptions(learning_rate)),
        scaler_({.enabled = in_float16}) {}

  at::Tensor scores(const at::Tensor& review) {
    const auto length = review.size(0);
    const auto missing = pads_ ? longest - length : 0;
    return plain_scores(model, torch::constant_pad_nd(review, {0, missing}, padding).unsqueeze(0), length);
  }

  void window(const Reviews& data) { window(data, 0, data.labels.size(0)); }
  /// Makes one update from the reviews [from, to).
  void window(const Reviews& data, std::int64_t from, std::int64_t to) {
    for (auto i = from; i < to; ++i) scaler_.scale(loss(data, i) / reviews_of_update).backward();
    scaler_.step(optimizer_);
    scaler_.update();
    optimizer_.zero_grad();
  }

  bloom::BloomForSequenceClassification model = nullptr;

 private:
  static bloom::BloomForSequenceClassification seeded(const bloom::BloomConfig& config) {
    torch::manual_seed(0);
    return bloom::BloomForSequenceClassification(config);
  }
  at::Tensor loss(const Reviews& data, std::int64_t i) {
    const gradaccum::Autocast autocast(data.labels.device(), torch::kHalf, in_float16_);
    return torch::cross_entropy_loss(scores(data.ids[i]), data.labels.slice(0, i, i + 1));
  }

  bool pads_, in_float16_;
  torch::optim::Adam optimizer_;
  gradaccum::AmpScaler scaler_;
};

/// Returns BLOOM-560m's shape.
inline bloom::BloomConfig bloom_560m() {
  return {.vocab_size = 250'880, .hidden_size = 1024, .n_layer = 24, .n_head = 16, .pad_token_id = padding};
}

/// Adds options that change the shape.
inline void add_shape(CLI::App& app, bloom::BloomConfig& config) {
  app.add_option("--words", config.vocab_size, "of the vocabulary")->check(CLI::Range(1000, 1 << 20));
  app.add_option("--width", config.hidden_size, "a multiple of 16")->check(CLI::Range(64, 4096));
  app.add_option("--layers", config.n_layer, "blocks")->check(CLI::Range(2, 64));
}

}  // namespace article
