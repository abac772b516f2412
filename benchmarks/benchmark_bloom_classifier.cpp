// SPDX-License-Identifier: Apache-2.0
//
// Fine-tuning a BLOOM by updates of 8 reviews: the loop of a well-known article (article_loop.hpp), padded and at true
// lengths, compared to examples/bloom_classifier. Lengths have IMDB's distribution; all start from the same weights.
// Also compares the accuracies after the same number of updates, of a small model on short reviews.

#include <gradaccum/autocast.hpp>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/flop_counter.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/progress_line.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>

#include "article_loop.hpp"
#include "harness.hpp"
#include "model/classifier.hpp"

namespace ga = gradaccum;

namespace {

using article::padding, article::Reviews;
constexpr auto reviews = article::reviews_of_update;

/// The example's training, with windows of 8 micro-batches of one review.
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

/// Returns the peak of one window, without the model and the optimizer's state.
template <class Program>
double peak_mib(Program& program, const Reviews& data) {
  ga::MemoryMeter meter;
  program.window(data);
  return static_cast<double>(meter.peak_bytes()) / ga::MiB;
}

constexpr int updates = 60, test_reviews = 400;

/// Returns the accuracy in percent, on unseen reviews.
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
  const auto theirs = accuracy_after_updates(article::Loop(config, false, learning_rate), config.vocab_size);
  fmt::print("  Accuracy after {} updates of a small model: the example {:.1f} %, the article's loop {:.1f} %\n",
             updates, ours(false), theirs);
  if (ga::is_bf16_fast(at::kCPU)) fmt::print("  in bfloat16 {:.1f} %\n", ours(true));
}

/// Prints the throughput by the useful work: tokens without padding, and the FLOP of the example's float32 update.
void print_throughput(const std::vector<harness::Contestant>& contestants, const std::vector<double>& medians,
                      Ours& ours, const Reviews& data) {
  const ga::FlopCounter counter;
  ours.window(data);
  const auto flops = static_cast<double>(counter.get_total_flops());
  std::int64_t tokens = 0;
  for (auto& review : data.ids) tokens += review.size(0);
  std::map<at::ScalarType, double> peaks;
  for (std::size_t i = 0; i < medians.size(); ++i) {
    const auto dtype = contestants[i].name.ends_with("bfloat16") ? at::kBFloat16 : at::kFloat;
    if (!peaks.contains(dtype)) peaks[dtype] = ga::measure_peak_flops(at::kCPU, dtype);
    fmt::print("  {:<48} {:>7.0f} tokens/s, {}\n", contestants[i].name, static_cast<double>(tokens) / medians[i],
               ga::flops_text(flops / medians[i], peaks[dtype]));
  }
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
  article::Loop padded(config, true), unpadded(config, false);
  Ours ours(config, false), bfloat16(config, true);
  // Excludes the biases, because the keys' have only rounding errors as gradients, which Adam turns into full steps.
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
  const auto medians = harness::contest(fmt::format("An update of {} reviews, BLOOM of {} layers, width {}, {} words",
                                                    reviews, config.n_layer, config.hidden_size, config.vocab_size),
                                        contestants, reviews, "reviews", options);
  print_throughput(contestants, medians, ours, data);
  fmt::print("  Peak memory of an update, MiB beyond weights and the optimizer's state:\n");
  fmt::print("  the example, float32 {:.0f}; the article's loop {:.0f}, with true lengths {:.0f}\n",
             peak_mib(ours, data), peak_mib(padded, data), peak_mib(unpadded, data));
  if (with_bfloat16) fmt::print("  the example, bfloat16 {:.0f}\n", peak_mib(bfloat16, data));
  compare_accuracies();
}
