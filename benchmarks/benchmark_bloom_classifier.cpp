// SPDX-License-Identifier: Apache-2.0
//
// Fine-tuning a BLOOM, an update of 8 reviews: the loop of a well-known article, in LibTorch as it stands there (each
// review padded to 1024 tokens, one at a time, the loss divided by 8, attention with its bias and mask in memory,
// torch::optim::Adam), against examples/bloom_classifier. The same without the padding for the peer, too. Lengths are
// drawn as IMDB's are distributed; all start from the same weights. And what both have learned after the same updates,
// of a small model and short reviews.

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
  at::Tensor labels;

  Reviews(std::int64_t vocabulary, std::int64_t count, std::uint64_t seed, double length_scale = 1)
      : labels(torch::arange(count) % 2) {
    torch::manual_seed(static_cast<std::int64_t>(seed));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto length = length_scale * std::exp(5.495 + 0.6465 * torch::randn({}).item<double>());
      ids.push_back(torch::randint(4, vocabulary, {std::clamp<std::int64_t>(std::lround(length), 10, longest)}));
    }
  }

  /// Puts in two words that tell the label: at 25 % of the places that of its own, at 5 % the other one.
  void make_telling() {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto chance = torch::rand_like(ids[i], torch::kFloat);
      const auto label = labels[static_cast<std::int64_t>(i)];
      const auto side = torch::where(chance < 0.25, label, 1 - label);
      ids[i] = torch::where(chance < 0.3, 4 + side, ids[i]);
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
  Article(const bloom::BloomConfig& config, bool pads, double learning_rate = 5e-5) : pads_(pads) {
    torch::manual_seed(0);
    model = bloom::BloomForSequenceClassification(config);
    optimizer_ = std::make_unique<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(learning_rate));
  }

  at::Tensor scores(const at::Tensor& review) {
    const auto length = review.size(0);
    const auto missing = pads_ ? longest - length : 0;
    return plain_scores(model, torch::constant_pad_nd(review, {0, missing}, padding).unsqueeze(0), length);
  }

  void window(const Reviews& data) {
    for (std::int64_t i = 0; i < reviews; ++i)
      (torch::cross_entropy_loss(scores(data.ids[i]), data.labels.slice(0, i, i + 1)) / reviews).backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  bloom::BloomForSequenceClassification model = nullptr;

 private:
  bool pads_;
  std::unique_ptr<torch::optim::Adam> optimizer_;
};

/// The example's, with windows of 8 micro-batches of one review.
class Ours {
 public:
  Ours(const bloom::BloomConfig& config, bool bfloat16, double learning_rate = 5e-5) : bfloat16_(bfloat16) {
    torch::manual_seed(0);
    model = bloom::BloomForSequenceClassification(config);
    optimizer_ = std::make_unique<ga::optim::Adam>(model->parameters(), ga::optim::AdamOptions(learning_rate));
  }

  at::Tensor scores(const at::Tensor& review) { return model->forward(review.unsqueeze(0)); }

  void window(const Reviews& data) {
    ga::data::LengthBuckets batches(data.ids, data.labels, {.batch_size = 1, .padding = padding});
    ga::GradAccumulator optimizer(*optimizer_, {.steps = reviews});
    for (auto& batch : batches) {
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
  bool bfloat16_;
  std::unique_ptr<ga::optim::Adam> optimizer_;
};

/// Of one window, beyond the model and the optimizer's state.
template <class Program>
double peak_mib(Program& program, const Reviews& data) {
  ga::MemoryMeter meter;
  program.window(data);
  return static_cast<double>(meter.peak_bytes()) / ga::MiB;
}

constexpr int updates = 60, test_reviews = 400;

/// In percent, of reviews that it has not seen.
template <class Program>
double accuracy_after_updates(Program&& program, std::int64_t vocabulary) {
  constexpr double short_ones = 0.1;
  for (int update = 0; update < updates; ++update) {
    Reviews data(vocabulary, reviews, 100 + update, short_ones);
    data.make_telling();
    program.window(data);
  }
  Reviews data(vocabulary, test_reviews, 99, short_ones);
  data.make_telling();
  torch::NoGradGuard no_grad;
  std::int64_t right = 0;
  for (std::int64_t i = 0; i < test_reviews; ++i)
    right += program.scores(data.ids[i]).argmax(1).equal(data.labels.slice(0, i, i + 1));
  return 100.0 * static_cast<double>(right) / test_reviews;
}

void compare_accuracies() {
  constexpr double learning_rate = 3e-3;
  const bloom::BloomConfig config{.vocab_size = 1000,
                                  .hidden_size = 64,
                                  .n_layer = 2,
                                  .n_head = 4,
                                  .initializer_range = 0.1,
                                  .pad_token_id = padding};
  const auto ours = [&](bool bfloat16) {
    return accuracy_after_updates(Ours(config, bfloat16, learning_rate), config.vocab_size);
  };
  const auto article = accuracy_after_updates(Article(config, false, learning_rate), config.vocab_size);
  fmt::print("  Accuracy after {} updates of a small model: the example {:.1f} %, the article's loop {:.1f} %\n",
             updates, ours(false), article);
  if (ga::is_bf16_fast(at::kCPU)) fmt::print("  in bfloat16 {:.1f} %\n", ours(true));
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
  const Reviews data(config.vocab_size, reviews, 3);
  Article padded(config, true), unpadded(config, false);
  Ours ours(config, false), bfloat16(config, true);
  // Not the biases: the keys' have no gradient but rounding, which Adam makes whole steps of.
  const auto weights_of = [](auto& program) {
    auto weights = program.model->transformer->h->parameters();
    std::erase_if(weights, [](const at::Tensor& weight) { return weight.dim() < 2; });
    return weights;
  };
  const bool with_bfloat16 = ga::is_bf16_fast(at::kCPU);
  std::vector<harness::Contestant> contestants{
      {"the example, float32", [&] { ours.window(data); }, weights_of(ours)},
      {"the article's loop, padded to 1024", [&] { padded.window(data); }, weights_of(padded)},
      {"the article's loop, true lengths", [&] { unpadded.window(data); }, weights_of(unpadded)}};
  if (with_bfloat16) contestants.push_back({"the example, bfloat16", [&] { bfloat16.window(data); }});
  harness::contest(fmt::format("An update of {} reviews, BLOOM of {} layers, width {}, {} words", reviews,
                               config.n_layer, config.hidden_size, config.vocab_size),
                   contestants, reviews, "reviews", options);
  fmt::print("  Peak memory of an update, MiB beyond weights and the optimizer's state:\n");
  fmt::print("  the example, float32 {:.0f}; the article's loop {:.0f}, with true lengths {:.0f}\n",
             peak_mib(ours, data), peak_mib(padded, data), peak_mib(unpadded, data));
  if (with_bfloat16) fmt::print("  the example, bfloat16 {:.0f}\n", peak_mib(bfloat16, data));
  compare_accuracies();
}
