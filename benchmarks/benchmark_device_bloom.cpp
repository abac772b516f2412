// SPDX-License-Identifier: Apache-2.0
//
// Fine-tuning a BLOOM of 560m's shapes on a CUDA device, on reviews of IMDB's lengths: ours, compared to the loop of a
// well-known article (article_loop.hpp), which computes attention step by step. They train one model alternately, in
// one process, each with its own optimizer. Ours uses LibTorch's flash attention, because cuDNN's, which LibTorch
// prefers on Hopper, builds a plan for each length.

#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/flop_counter.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/graphed_step.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../examples/bloom_classifier/objective.hpp"
#include "article_loop.hpp"
#include "card.hpp"
#include "harness.hpp"

namespace ga = gradaccum;
using article::Reviews;
using harness::device;

namespace {

using Model = bloom::BloomForSequenceClassification;

/// Receives each update's reviews and tokens without padding, and returns whether to continue.
using GoesOn = std::function<bool(std::int64_t reviews, std::int64_t tokens)>;

/// Makes batches of reviews of similar length, padded to a multiple of 64.
ga::data::LengthBuckets batches_of(const Reviews& data, std::int64_t micro_batch) {
  return {data.ids,
          data.labels,
          {.batch_size = micro_batch,
           .shuffle = true,
           .padding = article::padding,
           .pad_to_multiple_of = 64,
           .drop_last = true}};
}

using Objective = std::function<ga::Loss(Model&, const ga::data::SequenceBatch&)>;
using MakesObjective = std::function<Objective(Model&)>;

Objective objective_in(bool bfloat16) {
  return [bfloat16](Model& model, const ga::data::SequenceBatch& batch) {
    const ga::Autocast autocast(device, torch::kBFloat16, bfloat16);
    return bloom::padded_objective(model, batch);
  };
}

/// The folder of recorded steps, and their shapes.
struct Steps {
  std::filesystem::path folder = {};  ///< empty if there are none
  std::int64_t micro_batch = 32;
  std::size_t lengths = 16;  ///< the number of most frequent lengths; ours trains only these
};

/// Updates by 8 reviews, or by one micro-batch, of the most frequent lengths.
class Ours {
 public:
  Ours(Model model, const Reviews& data, std::int64_t micro_batch, std::size_t lengths, const MakesObjective& objective)
      : model_(std::move(model)),
        objective_(objective(model_)),
        batches_(batches_of(data, micro_batch)),
        frequent_(bloom::frequent_batches(batches_, lengths)),
        optimizer_(model_->parameters(), ga::optim::AdamWOptions(5e-5)),
        window_(optimizer_, {.steps = std::max<std::int64_t>(article::reviews_of_update / micro_batch, 1)}) {}

  /// Trains each length three times, so that kernels are loaded, and graphs captured and compared.
  void prepare() {
    for (int time = 0; time < 3; ++time)
      for (auto& batch : frequent_) static_cast<void>(step(batch));
  }

  void train(const GoesOn& goes_on) {
    std::int64_t reviews = 0, tokens = 0;
    for (;;)
      for (auto& batch : batches_) {
        if (!is_frequent(batch)) continue;
        const bool stepped = step(batch);
        reviews += batch.rows();
        tokens += batch.tokens;
        if (stepped && !goes_on(std::exchange(reviews, 0), std::exchange(tokens, 0))) return;
      }
  }

 private:
  bool is_frequent(const ga::data::SequenceBatch& batch) const {
    return std::ranges::any_of(frequent_, [&](auto& one) { return one.data.sizes() == batch.data.sizes(); });
  }

  bool step(const ga::data::SequenceBatch& batch) {
    window_.backward(objective_(model_, batch));
    const bool stepped = window_.step();
    window_.zero_grad();
    return stepped;
  }

  Model model_;
  Objective objective_;
  ga::data::LengthBuckets batches_;
  std::vector<ga::data::SequenceBatch> frequent_;  ///< one of each length
  ga::optim::AdamW optimizer_;
  ga::GradAccumulator<ga::optim::AdamW> window_;
};

class Article {
 public:
  Article(const Model& model, const Reviews& data, bool pads, bool in_float16)
      : data_(data), loop_(model, pads, in_float16) {}

  void prepare() {}

  void train(const GoesOn& goes_on) {
    constexpr auto together = article::reviews_of_update;
    for (std::int64_t from = 0;; from = (from + together) % data_.labels.size(0)) {
      loop_.window(data_, from, from + together);
      std::int64_t tokens = 0;
      for (auto i = from; i < from + together; ++i) tokens += data_.ids[i].size(0);
      if (!goes_on(together, tokens)) return;
    }
  }

 private:
  Reviews data_;
  article::Loop loop_;
};

class Clock {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The amount of training data, and its time.
struct Count {
  std::int64_t reviews = 0, tokens = 0;
  double seconds = 0, seconds_before = 0;  ///< of training, and of its preparation
  std::int64_t peak_bytes = 0;
};

struct Training {
  std::function<void()> prepare;
  std::function<void(const GoesOn&)> train;
};

struct Way {
  std::string name;
  std::function<Training()> begin;  ///< makes the optimizer
  Count count = {};
};

template <class Program, class... Arguments>
std::function<Training()> begins(Arguments... arguments) {
  return [=] {
    const auto program = std::make_shared<Program>(arguments...);
    return Training{[program] { program->prepare(); }, [program](const GoesOn& goes_on) { program->train(goes_on); }};
  };
}

std::vector<Way> all_ways(const Model& model, const Reviews& data, const Steps& steps) {
  const MakesObjective bf16 = [](Model&) { return objective_in(/*bfloat16=*/true); };
  const MakesObjective graphed = [=](Model& own) { return ga::GraphedStep(own, bf16(own)); };
  const auto ours = [&](const std::string& how, std::int64_t micro_batch, const MakesObjective& objective) {
    return Way{"ours, " + how, begins<Ours>(model, data, micro_batch, steps.lengths, objective)};
  };
  std::vector<Way> ways = {
      {"the article's loop, padded to 1024, float16", begins<Article>(model, data, /*pads=*/true, /*in_float16=*/true)},
      {"the article's loop, true lengths, float16", begins<Article>(model, data, /*pads=*/false, /*in_float16=*/true)},
      {"the article's loop, padded to 1024, float32",
       begins<Article>(model, data, /*pads=*/true, /*in_float16=*/false)},
      {"the article's loop, true lengths, float32", begins<Article>(model, data, /*pads=*/false, /*in_float16=*/false)},
      ours("8 times 1, bf16-mixed", 1, bf16),
      ours("8 at once, bf16-mixed", 8, bf16),
      ours("32 at once, bf16-mixed", 32, bf16),
      ours("8 at once, float32", 8, [](Model&) { return objective_in(/*bfloat16=*/false); }),
      ours("graphed, 8 times 1, bf16-mixed", 1, graphed),
      ours("graphed, 8 at once, bf16-mixed", 8, graphed),
      ours("graphed, 32 at once, bf16-mixed", 32, graphed),
  };
  const MakesObjective compiled = [=](Model& own) {
    return [step = ga::CompiledStep(own, bf16(own), steps.folder)](Model& model, const auto& batch) mutable {
      const auto loss = step(model, batch);
      TORCH_CHECK(step.report().eager == 0, "benchmark_device_bloom: --steps must have a step for each batch, but ",
                  step.report(), "give --together and --lengths as it was recorded with");
      return loss;
    };
  };
  if (!steps.folder.empty())
    ways.push_back(
        ours(fmt::format("compiled, {} at once, bf16-mixed", steps.micro_batch), steps.micro_batch, compiled));
  return ways;
}

void record(Model& model, const Reviews& data, const Steps& steps) {
  const auto batches = bloom::frequent_batches(batches_of(data, steps.micro_batch), steps.lengths);
  fmt::print("{}", fmt::streamed(ga::save_steps(model, objective_in(/*bfloat16=*/true), batches, steps.folder,
                                                {.any_rows = false, .constants = true})));
}

/// Trains for at least one update, and synchronizes the device.
Count train_for(double seconds, const Training& training) {
  Count count;
  const Clock clock;
  training.train([&](std::int64_t reviews, std::int64_t tokens) {
    count.reviews += reviews;
    count.tokens += tokens;
    return clock.seconds() < seconds;
  });
  torch::cuda::synchronize();
  count.seconds = clock.seconds();
  return count;
}

/// Prepares, warms up for a fifth of the time, and measures the rest.
void measure(Way& way, double seconds) {
  const ga::MemoryMeter meter;
  const Clock clock;
  const auto training = way.begin();
  training.prepare();
  torch::cuda::synchronize();
  way.count.seconds_before = std::max(way.count.seconds_before, clock.seconds());
  train_for(seconds / 5, training);
  const auto count = train_for(seconds * 4 / 5, training);
  way.count.reviews += count.reviews;
  way.count.tokens += count.tokens;
  way.count.seconds += count.seconds;
  way.count.peak_bytes = std::max(way.count.peak_bytes, meter.peak_bytes(device));
}

/// Returns FLOP per token in forward and backward of all blocks' weights, without attention.
double flops_of_token(const bloom::BloomConfig& config) {
  return 6.0 * 12 * static_cast<double>(config.hidden_size * config.hidden_size * config.n_layer);
}

double reviews_a_second(const Way& way) { return static_cast<double>(way.count.reviews) / way.count.seconds; }

void print(const std::vector<Way>& ways, const bloom::BloomConfig& config, double rate, std::int64_t model_bytes,
           const harness::Options& options) {
  fmt::print("  {:<44} {:>10} {:>10} {:>8} {:>8} {:>9} {:>10} {:>16}\n", "", "reviews/s", "tokens/s", "TFLOP/s", "MFU",
             "peak, GB", "before, s", "x the first row");
  for (auto& way : ways) {
    const auto tokens = static_cast<double>(way.count.tokens) / way.count.seconds;
    const auto flops = tokens * flops_of_token(config), mfu = flops / rate;
    const auto peak = model_bytes + way.count.peak_bytes;
    fmt::print("  {:<44} {:>10.1f} {:>10.0f} {:>8.1f} {:>6.1f} % {:>9.2f} {:>10.1f} {:>16.2f}\n", way.name,
               reviews_a_second(way), tokens, flops / 1e12, 100 * mfu, static_cast<double>(peak) / 1e9,
               way.count.seconds_before, reviews_a_second(way) / reviews_a_second(ways.front()));
    harness::append_json(
        options,
        fmt::format(R"({{"benchmark": "device_bloom", "contestant": "{}", "median_s": {}, )"
                    R"("reviews_per_s": {}, "tokens_per_s": {}, "flops_per_s": {}, "mfu": {}, "peak_bytes": {}}})",
                    way.name, 1 / reviews_a_second(way), reviews_a_second(way), tokens, flops, mfu, peak));
  }
}

}  // namespace

int main(int argc, char** argv) {
  auto config = article::bloom_560m();
  double seconds = 100;
  int rounds = 2;
  std::int64_t product = 8192;
  std::string only;
  Steps steps;
  std::filesystem::path record_in;
  std::int64_t reviews = 2048;
  const auto options =
      harness::parse(argc, argv, "Fine-tuning a BLOOM of 560m's shapes on a CUDA device", [&](CLI::App& app) {
        article::add_shape(app, config);
        app.add_option("--seconds", seconds, "for all ways and rounds together")->check(CLI::Range(1e-3, 1e5));
        app.add_option("--rounds", rounds, "how often each way trains")->check(CLI::Range(1, 1000));
        app.add_option("--product", product, "rows of the matrices that tell the card's rate")
            ->check(CLI::Range(64, 1 << 16));
        app.add_option("--reviews", reviews, "that there are")->check(CLI::Range(32, 1 << 20));
        app.add_option("--only", only, "those whose names have this");
        app.add_option("--record", record_in, "record the steps in this folder, for gradaccum-compile-step, and end");
        app.add_option("--steps", steps.folder,
                       "train by the steps that were recorded and compiled in this folder, too");
        app.add_option("--together", steps.micro_batch, "reviews of a recorded step")->check(CLI::Range(1, 1024));
        app.add_option("--lengths", steps.lengths, "of reviews, the most frequent ones; the article's loop takes all")
            ->check(CLI::Range(1, 100));
      });
  if (!harness::is_there("fine-tuning a BLOOM on a device")) return 0;
  at::globalContext().setSDPUseCuDNN(false);
  torch::manual_seed(0);
  Model model(config);
  model->to(device);
  std::int64_t model_bytes = 0;
  for (auto& parameter : model->parameters()) model_bytes += static_cast<std::int64_t>(parameter.nbytes());
  const Reviews data(config.vocab_size, reviews, /*seed=*/3, /*length_scale=*/1, device);
  if (!record_in.empty()) return record(model, data, {record_in, steps.micro_batch, steps.lengths}), 0;
  auto ways = all_ways(model, data, steps);
  std::erase_if(ways, [&](const Way& way) { return way.name.find(only) == std::string::npos; });
  TORCH_CHECK(!ways.empty(), "benchmark_device_bloom: --only must be part of the name of a way, got ", only);
  const auto rate = ga::measure_peak_flops(device, torch::kBFloat16, product);
  for (int round = 0; round < rounds; ++round)
    for (auto& way : ways) {
      measure(way, seconds / rounds / static_cast<double>(ways.size()));
      fmt::print(stderr, "round {} of {}: {}, {:.1f} reviews/s so far\n", round + 1, rounds, way.name,
                 reviews_a_second(way));
    }
  fmt::print(
      "Updates on a device, BLOOM of {} layers, width {}, {} words: {:.1f} M parameters; reviews of IMDB's lengths, in "
      "ours of the {} most frequent\n",
      config.n_layer, config.hidden_size, config.vocab_size, static_cast<double>(config.parameter_count()) / 1e6,
      steps.lengths);
  fmt::print(
      "  {}\n  MFU: 6 FLOP for a token and a weight of the blocks, over {:.0f} TFLOP/s of bfloat16 products of {} x "
      "{}\n",
      harness::machine(options), rate / 1e12, product, product);
  print(ways, config, rate, model_bytes, options);
  harness::print_card();
}
