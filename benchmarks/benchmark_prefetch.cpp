// SPDX-License-Identifier: Apache-2.0
//
// An epoch whose batches take as long as its steps: prepared ahead by Prefetch, by LibTorch's loader with a worker, and
// in the loop; computed, on a core that the training leaves free, and waited for, as from a disk. Bound: the longer of
// batches and steps alone. Then the cost of Prefetch if batches cost nothing.

#include <gradaccum/data/prefetch.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <chrono>
#include <thread>

#include "harness.hpp"
#include "networks.hpp"

namespace ga = gradaccum;

namespace {

constexpr std::int64_t batches = 60, rows = 64;
using Prepare = std::function<ga::data::Batch(std::int64_t)>;

/// A custom range.
class Epoch {
 public:
  explicit Epoch(Prepare prepare) : prepare_(std::move(prepare)) {}

  struct Iterator {
    const Epoch* epoch;
    std::int64_t number;
    ga::data::Batch operator*() const { return epoch->prepare_(number); }
    Iterator& operator++() {
      ++number;
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return number == batches; }
  };
  Iterator begin() const { return {this, 0}; }
  std::default_sentinel_t end() const { return {}; }

 private:
  Prepare prepare_;
};

/// Makes the same batches for LibTorch's loader.
struct Dataset : torch::data::datasets::BatchDataset<Dataset, ga::data::Batch> {
  explicit Dataset(Prepare given) : prepare(std::move(given)) {}
  ga::data::Batch get_batch(c10::ArrayRef<std::size_t> indices) override {
    return prepare(static_cast<std::int64_t>(indices.front()));
  }
  std::optional<std::size_t> size() const override { return static_cast<std::size_t>(batches); }

  Prepare prepare;
};

struct Training {
  torch::nn::Sequential network = harness::make_network({784, 512, 512, 10});
  ga::optim::AdamW adamw{network->parameters(), torch::optim::AdamWOptions(1e-4)};

  void step(const ga::data::Batch& batch) {
    torch::cross_entropy_loss(network->forward(batch.data), batch.target).backward();
    adamw.step();
    adamw.zero_grad();
  }
  template <class Range>
  void run(Range&& range) {
    for (auto&& batch : range) step(batch);
  }
};

/// Measures the time of a step.
double seconds_of_step() {
  Training training;
  const ga::data::Batch batch{torch::rand({rows, 784}), torch::randint(10, {rows})};
  std::vector<double> times;
  for (int i = 0; i < 60; ++i) times.push_back(harness::seconds([&] { training.step(batch); }));
  return harness::median(times);
}

void compare(const std::string& title, const Prepare& prepare, const harness::Options& options) {
  Training ours, loader, plain, alone;
  const Epoch epoch(prepare);
  ga::data::Prefetch ahead(epoch, {.depth = 2});
  auto workers = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Dataset(prepare), torch::data::DataLoaderOptions(1).workers(1));
  std::vector<ga::data::Batch> ready;
  for (auto batch : epoch) ready.push_back(batch);
  const auto longer = [&] {
    const auto preparing = harness::seconds([&] {
      for (auto batch : epoch) static_cast<void>(batch);
    });
    return std::max(preparing, harness::seconds([&] { alone.run(ready); }));
  };
  harness::contest(title,
                   {{"Prefetch", [&] { ours.run(ahead); }, ours.network->parameters()},
                    {"in the loop", [&] { plain.run(epoch); }, plain.network->parameters()},
                    {"LibTorch's loader, one worker", [&] { loader.run(*workers); }, loader.network->parameters()},
                    {.name = "bound: batches or steps, alone", .bound = true, .seconds = longer}},
                   static_cast<double>(batches), "batches", options);
}

/// Uses batches that exist already, which only have to be handed over.
void compare_overhead(const std::string& name, const std::vector<std::int64_t>& widths,
                      const harness::Options& options) {
  auto ours = harness::make_network(widths), plain = harness::make_network(widths);
  const auto x = torch::rand({batches * rows, widths.front()}), y = torch::randint(widths.back(), {batches * rows});
  ga::data::TensorBatches our_batches(x, y, {.batch_size = rows}), plain_batches(x, y, {.batch_size = rows});
  ga::data::Prefetch ahead(our_batches);
  const auto run = [](auto& network, auto& range) {
    for (auto& batch : range) torch::cross_entropy_loss(network->forward(batch.data), batch.target).backward();
    network->zero_grad();
  };
  harness::contest(fmt::format("An epoch of {} batches that are views, forward and backward of {}", batches, name),
                   {{"Prefetch", [&] { run(ours, ahead); }, ours->parameters()},
                    {"in the loop", [&] { run(plain, plain_batches); }, plain->parameters()}},
                   static_cast<double>(batches), "batches", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "What Prefetch gains, and what it costs");
  const auto images = torch::rand({batches, rows, 784}), labels = torch::randint(10, {batches, rows});
  const auto batch_of = [&](std::int64_t number) { return ga::data::Batch{images[number], labels[number]}; };

  const auto of_step = std::chrono::duration<double>(seconds_of_step());
  compare(
      fmt::format("An epoch of {} batches that are waited for, {:.2f} ms each", batches, of_step.count() * 1e3),
      [&](std::int64_t number) {
        std::this_thread::sleep_for(of_step);
        return batch_of(number);
      },
      options);
  compare_overhead("784-512-512-10", {784, 512, 512, 10}, options);

  torch::set_num_threads(1);
  const auto time = seconds_of_step();
  const auto decode = [](std::int64_t rounds) {
    auto pixels = torch::ones({8192});  // few enough for one thread
    for (std::int64_t i = 0; i < rounds; ++i) pixels.sin_();
  };
  constexpr std::int64_t trial = 2000;
  const auto rounds = static_cast<std::int64_t>(trial * time / harness::seconds([&] { decode(trial); }));
  compare(
      fmt::format("An epoch of {} batches that are computed, {:.2f} ms each, one thread trains", batches, time * 1e3),
      [&](std::int64_t number) {
        decode(rounds);
        return batch_of(number);
      },
      options);
}
