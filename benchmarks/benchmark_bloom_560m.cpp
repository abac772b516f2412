// SPDX-License-Identifier: Apache-2.0
//
// Fine-tuning a BLOOM of 560m's shapes: memory and time of each way to train, for updates of 8 reviews of IMDB's
// lengths, compared to the loop of a well-known article (article_loop.hpp), which also runs without mkl_on_amd.hpp on
// AMD processors. Each way runs in a separate process, to measure its resident memory; the ways alternate in rounds.

#include <gradaccum/autocast.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>

#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "../examples/bloom_classifier/optimizer.hpp"
#include "article_loop.hpp"
#include "harness.hpp"
#include "kernel_caches.hpp"
#include "model_folder.hpp"

namespace ga = gradaccum;

namespace {

using article::Reviews;
using Json = nlohmann::json;

constexpr double learning_rate = 5e-5, gigabyte = 1e9;

// --- The ways to train

/// A way to make updates from reviews.
struct Way {
  std::string name;
  std::string optimizer = {};  ///< none: the article's loop
  std::int64_t together = 1;   ///< reviews of one forward and backward pass, packed
  bool autocast = false;
  bool bfloat16_parameters = false;
  bool in_backward = false;
  bool checkpoints = false;                   ///< each block is recomputed in backward
  std::optional<double> most_gigabytes = {};  ///< the goal
  bool pads = false;                          ///< for the article's loop: padded, or at true lengths
  bool mkl_as_it_is = false;

  bool in_bfloat16() const { return autocast || bfloat16_parameters; }
};

std::vector<Way> all_ways() {
  const auto together = article::reviews_of_update;
  return {
      {.name = "the article's loop, padded to 1024", .pads = true},
      {.name = "the article's loop, true lengths"},
      {.name = "the article's loop, padded to 1024, MKL as it is", .pads = true, .mkl_as_it_is = true},
      {.name = "the article's loop, true lengths, MKL as it is", .mkl_as_it_is = true},
      {.name = "Adam, 8 reviews at once", .optimizer = "adam", .together = together},
      {.name = "Adam, 8 reviews at once, bf16-mixed", .optimizer = "adam", .together = together, .autocast = true},
      {.name = "Adam, 8 times 1", .optimizer = "adam"},
      {.name = "Adam, 8 times 1, bf16-mixed", .optimizer = "adam", .autocast = true},
      {.name = "AdamW, 8 times 1, checkpoints", .optimizer = "adamw", .checkpoints = true, .most_gigabytes = 6.6},
      {.name = "AdamW8bit, 8 times 1, checkpoints",
       .optimizer = "adamw8bit",
       .checkpoints = true,
       .most_gigabytes = 4.6},
      {.name = "AdamW8bit in backward, 8 at once, checkpoints",
       .optimizer = "adamw8bit",
       .together = together,
       .in_backward = true,
       .checkpoints = true,
       .most_gigabytes = 3.5},
      {.name = "bfloat16 parameters, AdamW8bit in backward, 1, checkpoints",
       .optimizer = "adamw8bit",
       .bfloat16_parameters = true,
       .in_backward = true,
       .checkpoints = true,
       .most_gigabytes = 1.9},
  };
}

class Ours {
 public:
  Ours(const bloom::BloomConfig& config, const Way& way) : way_(way) {
    torch::manual_seed(0);
    model_ = bloom::detail::new_model(config, way.bfloat16_parameters ? torch::kBFloat16 : torch::kFloat);
    if (way.checkpoints) model_->checkpoint_blocks({.segments = config.n_layer - 1});
    model_->transformer->sparse_embedding_gradient(true);
    optimizer_ = bloom::make_optimizer(way.optimizer, model_->parameters(), learning_rate);
    const auto passes = way.in_backward ? 1 : article::reviews_of_update / way.together;
    windows_.emplace(*optimizer_, ga::GradAccumulatorOptions{.steps = passes, .in_backward = way.in_backward});
  }

  /// Trains on 8 reviews: one update, or one per pass if the optimizer steps in backward.
  void window(const Reviews& data) {
    const auto count = static_cast<std::int64_t>(data.ids.size());
    for (std::int64_t from = 0; from < count; from += way_.together) {
      const auto loss = loss_of(data, from, std::min(from + way_.together, count));
      windows_->backward(loss);
      windows_->step();
      windows_->zero_grad();
    }
  }

 private:
  ga::Loss loss_of(const Reviews& data, std::int64_t from, std::int64_t to) {
    const ga::Autocast autocast(at::kCPU, at::kBFloat16, way_.autocast);
    const std::vector<at::Tensor> rows(data.ids.begin() + from, data.ids.begin() + to);
    std::vector<std::int64_t> lengths;
    for (auto& row : rows) lengths.push_back(row.size(0));
    const auto scores = rows.size() == 1 ? model_->forward(rows[0].unsqueeze(0))
                                         : model_->forward_packed(at::cat(rows), torch::tensor(lengths));
    return {torch::cross_entropy_loss(scores.to(torch::kFloat), data.labels.slice(0, from, to)), to - from};
  }

  Way way_;
  bloom::BloomForSequenceClassification model_ = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<ga::GradAccumulator<torch::optim::Optimizer>> windows_;
};

// --- One way, in this process

/// Returns FLOP of an update's matrix products: of each token with the blocks' weights, of which the last block counts
/// only keys, queries and values; and of attention, in which a token sees half of its review on average.
double flops_of(const Reviews& data, const bloom::BloomConfig& config) {
  const auto h = static_cast<double>(config.hidden_size), blocks = static_cast<double>(config.n_layer - 1);
  double flops = 0;
  for (auto& review : data.ids) {
    const auto t = static_cast<double>(review.size(0));
    flops += 6 * t * (blocks * 12 * h * h + 3 * h * h) + 6 * t * t * h * blocks;
  }
  return flops;
}

/// Measures FLOP/s of the products with a block's weights, forward and backward, for this number of tokens.
double product_rate(const bloom::BloomConfig& config, std::int64_t tokens, at::ScalarType dtype) {
  const auto h = config.hidden_size;
  double flops = 0, seconds = 0;
  for (const auto& [in, out] : {std::pair{h, 3 * h}, {h, h}, {h, 4 * h}, {4 * h, h}}) {
    const auto x = torch::randn({tokens, in}).to(dtype), w = torch::randn({out, in}).to(dtype),
               g = torch::randn({tokens, out}).to(dtype);
    const auto products = [&] { torch::mm(x, w.t()), torch::mm(g, w), torch::mm(g.t(), x); };
    products();
    std::vector<double> times;
    for (int i = 0; i < 3; ++i) times.push_back(harness::seconds(products));
    seconds += harness::median(times);
    flops += 6.0 * static_cast<double>(tokens * in * out);
  }
  return flops / seconds;
}

template <class Training>
Json measured(Training&& training, const std::vector<Reviews>& updates, const Reviews& warm_up) {
  training.window(warm_up);  // creates the optimizer's state, and maps its memory
  std::vector<double> times;
  for (auto& update : updates) times.push_back(harness::seconds([&] { training.window(update); }));
  return times;
}

Json run(const Way& way, const bloom::BloomConfig& config, int updates) {
  std::vector<Reviews> data;
  double flops = 0;
  std::int64_t tokens = 0;
  for (int update = 0; update < updates; ++update) {
    data.emplace_back(config.vocab_size, article::reviews_of_update, 3 + update);
    flops += flops_of(data.back(), config);
    for (auto& review : data.back().ids) tokens += review.size(0);
  }
  const auto few = way.pads ? 1 : article::reviews_of_update;  // long, and the memory is always the same
  const Reviews warm_up(config.vocab_size, few, 2);
  ga::MemoryMeter meter;
  const auto times = !way.optimizer.empty() ? measured(Ours(config, way), data, warm_up)
                                            : measured(article::Loop(config, way.pads), data, warm_up);
  const auto peak = meter.peak_bytes(), resident = ga::peak_resident_memory().value_or(0);
  const auto rate = product_rate(config, 1024, way.in_bfloat16() ? at::kBFloat16 : at::kFloat);
  return {{"name", way.name}, {"peak", peak},   {"resident", resident}, {"seconds", times},
          {"tokens", tokens}, {"flops", flops}, {"product_rate", rate}, {"sgemm", harness::multiplied_by()}};
}

// --- All ways, in processes

struct Settings {
  std::string way, only;  // one way, in this process; ways whose names contain this
  int updates = 3, rounds = 1;
};

/// Runs a command in a new process, and returns its results.
Json run_apart(const std::string& command) {
  std::fflush(stdout);
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string line(1 << 16, '\0');
  if (!pipe || !std::fgets(line.data(), static_cast<int>(line.size()), pipe.get()))
    throw std::runtime_error(command + " gave nothing");
  return Json::parse(line.c_str());
}

std::string shell_word(const std::string& text) {
  std::string all = "'";
  for (const char c : text) all += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return all + "'";
}

/// Rounds of each way, by name.
using Found = std::map<std::string, std::vector<Json>>;

/// Returns the seconds per update: the median of the rounds' means; 0 if it has not run.
double seconds_of(const Found& found, const std::string& way) {
  const auto rounds = found.find(way);
  if (rounds == found.end()) return 0;
  std::vector<double> means;
  for (auto& round : rounds->second) {
    const std::vector<double> times = round.at("seconds");
    means.push_back(std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size()));
  }
  return harness::median(means);
}

std::string goal_text(const Way& way, double peak) {
  if (!way.most_gigabytes) return "";
  return fmt::format("  at most {:.1f} GB: {}", *way.most_gigabytes, peak <= *way.most_gigabytes ? "met" : "MISSED");
}

void print_row(const Way& way, const Found& found, const harness::Options& options) {
  const auto& any = found.at(way.name).front();
  const auto number = [&](const char* name) { return any.at(name).get<double>(); };
  const double seconds = seconds_of(found, way.name), updates = static_cast<double>(any.at("seconds").size());
  const double flops = number("flops") / updates / seconds, peak_flops = number("product_rate");
  const double peak = number("peak") / gigabyte, resident = number("resident") / gigabyte;
  fmt::print("  {:<60} {:>6.2f} {:>8.2f} {:>7.2f} {:>8.0f}  {:<40}", way.name, peak, resident, seconds,
             number("tokens") / updates / seconds, ga::flops_text(flops, peak_flops));
  std::string ratios;
  for (const auto* mkl : {"", ", MKL as it is"})
    for (const auto* peer : {"the article's loop, padded to 1024", "the article's loop, true lengths"})
      if (const double theirs = seconds_of(found, std::string(peer) + mkl); theirs > 0) {
        fmt::print(" {:>6.2f}", theirs / seconds);
        ratios += fmt::format(R"(, "{}{}, over it": {})", peer, mkl, theirs / seconds);
      }
  fmt::print("{}\n", goal_text(way, peak));
  harness::append_json(options,
                       fmt::format(R"({{"benchmark": "bloom_560m", "contestant": "{}", "median_s": {}, )"
                                   R"("peak_bytes": {}, "resident_bytes": {}, "share_of_products": {}{}}})",
                                   way.name, seconds, number("peak"), number("resident"), flops / peak_flops, ratios));
}

}  // namespace

int main(int argc, char** argv) {
  bloom::limit_kernel_caches();  // in all ways
  auto config = article::bloom_560m();
  Settings settings;
  const auto options = harness::parse(argc, argv, "Fine-tuning a BLOOM of 560m's shapes", [&](CLI::App& app) {
    article::add_shape(app, config);
    app.add_option("--updates", settings.updates, "of 8 reviews, in a round")->check(CLI::Range(1, 1000));
    app.add_option("--rounds", settings.rounds, "how often each runs")->check(CLI::Range(1, 1000));
    app.add_option("--only", settings.only, "those whose names have this");
    app.add_option("--way", settings.way, "this one alone, in this process: prints JSON");
  });
  auto ways = all_ways();
  if (!settings.way.empty()) {
    for (auto& way : ways)
      if (way.name == settings.way) fmt::print("{}\n", run(way, config, settings.updates).dump());
    return 0;
  }
  const bool tells_mkl = mkl_serv_intel_cpu_true() != 0;
  std::erase_if(ways, [&](const Way& way) {
    return (way.mkl_as_it_is && !tells_mkl) || (way.in_bfloat16() && !ga::is_bf16_fast(at::kCPU)) ||
           way.name.find(settings.only) == std::string::npos;
  });
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  Found found;
  for (int round = 0; round < settings.rounds; ++round)
    for (auto& way : ways) {
      fmt::print(stderr, "round {} of {}: {}\n", round + 1, settings.rounds, way.name);  // takes one or two minutes
      found[way.name].push_back(
          run_apart(fmt::format("{}{} --way {} --words {} --width {} --layers {} --updates {} --threads {}{}",
                                way.mkl_as_it_is ? "GRADACCUM_MKL_ON_AMD=0 " : "", shell_word(program),
                                shell_word(way.name), config.vocab_size, config.hidden_size, config.n_layer,
                                settings.updates, options.threads, options.keep_memory ? " --keep-memory" : "")));
    }
  fmt::print(
      "An update of {} reviews of IMDB's lengths, BLOOM of {} layers, width {}, {} words: {:.1f} M parameters\n  {}\n",
      article::reviews_of_update, config.n_layer, config.hidden_size, config.vocab_size,
      static_cast<double>(config.parameter_count()) / 1e6, harness::machine(options));
  fmt::print(
      "  GB of tensors at the peak, and resident; seconds an update; tokens/s; FLOP/s and MFU of products alone;\n"
      "  the article's time over it: padded, at true lengths{}\n",
      tells_mkl ? ", and again with MKL as it is" : "");
  for (auto& way : ways) print_row(way, found, options);
}
