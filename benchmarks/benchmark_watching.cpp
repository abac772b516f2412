// SPDX-License-Identifier: Apache-2.0
//
// The cost of watching: an epoch of FashionMNIST by the Trainer, with all policies that show and write numbers,
// compared to the same without. Both evaluate the test images after the epoch. Two epochs differ by more than this
// cost, so the time inside of the policies is measured, too, hook by hook.

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/report.hpp>
#include <gradaccum/policies/tensorboard.hpp>
#include <gradaccum/trainer.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fashion_programs.hpp"
#include "harness.hpp"

namespace {

namespace programs = fashion_programs;
namespace ga = gradaccum;
using Clock = std::chrono::steady_clock;

const auto scored = [](torch::nn::Sequential& model, const ga::data::Batch& batch) {
  auto output = model->forward(batch.data);
  auto loss = torch::cross_entropy_loss(output, batch.target);
  return ga::Loss{loss, batch.target.size(0)}.with(output, batch.target);
};

/// The time from one mark to the next.
struct Laps {
  static constexpr std::size_t count = 4;
  std::array<double, count> seconds = {};
  Clock::time_point last = Clock::now();

  void add(std::size_t lap) {
    const auto now = Clock::now();
    if (lap < count) seconds[lap] += std::chrono::duration<double>(now - last).count();
    last = now;
  }
};

/// A policy between two others: ends the lap of the policy before, and begins that of `next`.
template <std::size_t next>
struct Mark {
  Laps* laps;

  struct Guard {
    Laps* laps;
    ~Guard() { laps->add(next); }  // guards end in reverse
  };
  Guard fit_scope() const {
    mark();
    return {laps};
  }
  void before_close() const { mark(); }
  void before_step(ga::Gradients&) const { mark(); }
  void after_window(const ga::Step&) const { mark(); }
  void after_step(const ga::Step&) const { mark(); }
  void on_validation(const ga::Validation&) const { mark(); }
  void at_boundary() const { mark(); }
  void mark() const { laps->add(next == 0 ? Laps::count : next - 1); }
};

/// A network, and a Trainer with these policies.
template <class... Policies>
class Run {
 public:
  Run(const programs::Settings& settings, const fashion_mnist::Dataset& dataset, Policies... policies)
      : model_(programs::make_model(settings)),
        batches_(dataset.train.images, dataset.train.labels, {.batch_size = programs::batch_size, .shuffle = true}),
        test_(dataset.test.images, dataset.test.labels, {.batch_size = 1000}),
        trainer_(model_, adamw_, scored, ga::ClipNorm{.max = 1.0}, ga::Validate(test_, ga::Accuracy{}),
                 std::move(policies)...) {}  // clips to compute a norm

  void epoch() { trainer_.fit(batches_); }
  std::vector<at::Tensor> parameters() const { return model_->parameters(); }

 private:
  using Range = ga::data::TensorBatches;
  torch::nn::Sequential model_;
  ga::optim::AdamW adamw_{model_->parameters(), ga::optim::AdamWOptions(3e-4)};
  Range batches_, test_;
  decltype(ga::Trainer(model_, adamw_, scored, ga::ClipNorm{}, ga::Validate(test_, ga::Accuracy{}),
                       std::declval<Policies>()...)) trainer_;
};

/// Prints the policies' shares of an epoch.
void print_shares(auto& run, Laps& laps, const harness::Options& options) {
  constexpr std::array names{"TensorBoard", "Report", "MetricsLog", "EarlyStopping"};
  std::array<std::vector<double>, Laps::count> shares;
  std::vector<double> of_all, epochs;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    laps.seconds = {};
    epochs.push_back(harness::seconds([&] { run.epoch(); }));
    for (std::size_t i = 0; i < Laps::count; ++i) shares[i].push_back(laps.seconds[i] / epochs.back());
    of_all.push_back(std::accumulate(laps.seconds.begin(), laps.seconds.end(), 0.0) / epochs.back());
  }
  const auto machine = harness::machine(options);
  const auto print = [&](const char* name, const std::vector<double>& share) {
    const auto [least, most] = std::minmax_element(share.begin(), share.end());
    fmt::print("  {:<48} {:>6.2f} % ({:.2f} to {:.2f})\n", name, 100 * harness::median(share), 100 * *least,
               100 * *most);
    harness::append_json(options, fmt::format(R"({{"benchmark": "{}", "contestant": "{}", "share": {}, )"
                                              R"("repeats": {}, "machine": "{}"}})",
                                              "Time inside of the policies that look", name, harness::median(share),
                                              options.repeats, machine));
  };
  fmt::print("Time inside of the policies that look, of an epoch of {:.0f} ms\n", 1e3 * harness::median(epochs));
  for (std::size_t i = 0; i < Laps::count; ++i) print(names[i], shares[i]);
  print("all together", of_all);
}

}  // namespace

int main(int argc, char** argv) {
  programs::Settings settings;
  const auto options = harness::parse(argc, argv, "What it costs to look at a training",
                                      [&](CLI::App& app) { app.add_option("--data", settings.data, "the data set"); });
  const auto dataset = fashion_mnist::load_dataset(settings.data);
  const auto folder = std::filesystem::temp_directory_path() / "gradaccum_benchmark_watching";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  Laps laps;
  Run looked_at(settings, dataset, Mark<0>{&laps}, ga::TensorBoard{.directory = folder / "runs"}, Mark<1>{&laps},
                ga::Report{.path = folder / "run.html"}, Mark<2>{&laps}, ga::MetricsLog{.path = folder / "train.csv"},
                Mark<3>{&laps}, ga::EarlyStopping{.patience = 1'000'000}, Mark<4>{&laps});
  Run alone(settings, dataset);
  harness::contest(
      "An epoch of FashionMNIST by the Trainer, validated at its end, AdamW",
      {{"TensorBoard, Report, MetricsLog, EarlyStopping", [&] { looked_at.epoch(); }, looked_at.parameters()},
       {"nobody looks", [&] { alone.epoch(); }, alone.parameters()}},
      programs::rows, "images", options);
  print_shares(looked_at, laps, options);
  std::filesystem::remove_all(folder);
}
