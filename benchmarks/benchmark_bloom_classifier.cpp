// SPDX-License-Identifier: Apache-2.0
//
// Fine-tuning a BLOOM, an update of 8 reviews: the loop of a well-known article, in LibTorch as it stands there (each
// review padded to 1024 tokens, one at a time, the loss divided by 8, attention with its bias and mask in memory,
// torch::optim::Adam), against examples/bloom_classifier. The same without the padding for the peer, too. Lengths are
// drawn as IMDB's are distributed; all start from the same weights.

#include <gradaccum/autocast.hpp>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adam.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "harness.hpp"
#include "model/classifier.hpp"

namespace ga = gradaccum;

namespace {

constexpr std::int64_t reviews = 8, longest = 1024, padding = 3;

struct Reviews {
  std::vector<at::Tensor> ids;
  at::Tensor labels = torch::arange(reviews) % 2;

  explicit Reviews(std::int64_t vocabulary) {
    torch::manual_seed(3);
    for (int i = 0; i < reviews; ++i) {
      const auto length = std::exp(5.495 + 0.6465 * torch::randn({}).item<double>());
      ids.push_back(torch::randint(4, vocabulary, {std::clamp<std::int64_t>(std::lround(length), 10, longest)}));
    }
  }
};

/// Scores as Hugging Face's Python computes them, step by step: [1, t] ids, of which `length` are no padding.
at::Tensor plain_scores(bloom::BloomForSequenceClassification& model, const at::Tensor& ids, std::int64_t length) {
  const auto& config = model->config();
  const auto t = ids.size(1), heads = config.n_head, width = config.head_dim();
  const auto slopes = torch::pow(2.0, -8.0 / heads * torch::arange(1, heads + 1)).view({heads, 1, 1});
  const auto places = torch::arange(t).clamp_max(length - 1);
  const auto alibi = slopes * places;
  const auto unseen = torch::ones({t, t}, torch::kBool).triu(1) | (torch::arange(t) >= length);
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

/// The article's loop.
class Article {
 public:
  Article(const bloom::BloomConfig& config, const Reviews& data, bool pads) : data_(data), pads_(pads) {
    torch::manual_seed(0);
    model = bloom::BloomForSequenceClassification(config);
    optimizer_ = std::make_unique<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(5e-5));
  }

  void window() {
    for (std::int64_t i = 0; i < reviews; ++i) {
      const auto length = data_.ids[i].size(0);
      const auto missing = pads_ ? longest - length : 0;
      const auto ids = torch::constant_pad_nd(data_.ids[i], {0, missing}, padding).unsqueeze(0);
      const auto scores = plain_scores(model, ids, length);
      (torch::cross_entropy_loss(scores, data_.labels.slice(0, i, i + 1)) / reviews).backward();
    }
    optimizer_->step();
    optimizer_->zero_grad();
  }

  bloom::BloomForSequenceClassification model = nullptr;

 private:
  const Reviews& data_;
  bool pads_;
  std::unique_ptr<torch::optim::Adam> optimizer_;
};

/// The example's, with windows of 8 micro-batches of one review.
class Ours {
 public:
  Ours(const bloom::BloomConfig& config, const Reviews& data, bool bfloat16)
      : batches_(data.ids, data.labels, {.batch_size = 1, .padding = padding}), bfloat16_(bfloat16) {
    torch::manual_seed(0);
    model = bloom::BloomForSequenceClassification(config);
    optimizer_ = std::make_unique<ga::optim::Adam>(model->parameters(), ga::optim::AdamOptions(5e-5));
  }

  void window() {
    ga::GradAccumulator optimizer(*optimizer_, {.steps = reviews});
    for (auto& batch : batches_) {
      std::optional<ga::Autocast> autocast;
      if (bfloat16_) autocast.emplace(at::kCPU, at::kBFloat16);
      const auto scores = model->forward(batch.data, torch::ones_like(batch.data)).to(torch::kFloat);
      const auto loss = torch::cross_entropy_loss(scores, batch.target);
      autocast.reset();
      optimizer.backward(ga::Loss{loss, batch.rows()});
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  bloom::BloomForSequenceClassification model = nullptr;

 private:
  ga::data::LengthBuckets batches_;
  bool bfloat16_;
  std::unique_ptr<ga::optim::Adam> optimizer_;
};

/// Of one window, beyond the model and the optimizer's state.
template <class Program>
double peak_mib(Program& program) {
  ga::MemoryMeter meter;
  program.window();
  return static_cast<double>(meter.peak_bytes()) / ga::MiB;
}

}  // namespace

int main(int argc, char** argv) {
  bloom::BloomConfig config{
      .vocab_size = 250'880, .hidden_size = 256, .n_layer = 3, .n_head = 8, .pad_token_id = padding};
  const auto options = harness::parse(argc, argv, "Fine-tuning a BLOOM, against an article's loop", [&](CLI::App& app) {
    app.add_option("--vocabulary", config.vocab_size, "BLOOM's has 250,880 tokens")->check(CLI::Range(1000, 1 << 20));
    app.add_option("--width", config.hidden_size, "a multiple of 8; BLOOM-560m's is 1024")->check(CLI::Range(64, 4096));
    app.add_option("--layers", config.n_layer, "BLOOM-560m's are 24")->check(CLI::Range(2, 48));
  });
  const Reviews data(config.vocab_size);
  Article padded(config, data, true), unpadded(config, data, false);
  Ours ours(config, data, false), bfloat16(config, data, true);
  // Not the biases: the keys' have no gradient but rounding, which Adam makes whole steps of.
  const auto weights_of = [](auto& program) {
    auto weights = program.model->transformer->h->parameters();
    std::erase_if(weights, [](const at::Tensor& weight) { return weight.dim() < 2; });
    return weights;
  };
  harness::contest(fmt::format("An update of {} reviews, BLOOM of {} layers, width {}, {} words", reviews,
                               config.n_layer, config.hidden_size, config.vocab_size),
                   {{"the example, float32", [&] { ours.window(); }, weights_of(ours)},
                    {"the article's loop, padded to 1024", [&] { padded.window(); }, weights_of(padded)},
                    {"the article's loop, true lengths", [&] { unpadded.window(); }, weights_of(unpadded)},
                    {"the example, bfloat16", [&] { bfloat16.window(); }}},
                   reviews, "reviews", options);
  fmt::print("  Peak memory of an update, MiB beyond weights and the optimizer's state:\n");
  fmt::print("  the example, float32 {:.0f}, bfloat16 {:.0f}; the article's loop {:.0f}, with true lengths {:.0f}\n",
             peak_mib(ours), peak_mib(bfloat16), peak_mib(padded), peak_mib(unpadded));
}
