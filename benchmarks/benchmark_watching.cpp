// SPDX-License-Identifier: Apache-2.0
//
// What it costs to look: an epoch of FashionMNIST by the Trainer, with all that shows and writes numbers, against the
// same without. Both evaluate the test images when the epoch is over. Peer: the run that nobody looks at.

#include <filesystem>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/report.hpp>
#include <gradaccum/policies/tensorboard.hpp>
#include <gradaccum/trainer.hpp>
#include <memory>
#include <type_traits>
#include <utility>

#include "fashion_programs.hpp"
#include "harness.hpp"

namespace {

namespace programs = fashion_programs;
namespace ga = gradaccum;

const auto scored = [](torch::nn::Sequential& model, const ga::data::Batch& batch) {
  auto output = model->forward(batch.data);
  auto loss = torch::cross_entropy_loss(output, batch.target);
  return ga::Loss{loss, batch.target.size(0)}.with(output, batch.target);
};

/// A Trainer of the network with these policies, and an epoch of it.
template <class... Policies>
harness::Contestant contestant(const std::string& name, const programs::Settings& settings,
                               const fashion_mnist::Dataset& dataset, Policies... policies) {
  struct Run {
    torch::nn::Sequential model;
    ga::optim::AdamW adamw{model->parameters(), ga::optim::AdamWOptions(3e-4)};
    ga::data::TensorBatches batches, test;
    Run(const programs::Settings& from, const fashion_mnist::Dataset& data)
        : model(programs::make_model(from)),
          batches(data.train.images, data.train.labels, {.batch_size = programs::batch_size, .shuffle = true}),
          test(data.test.images, data.test.labels, {.batch_size = 1000}) {}
  };
  auto run = std::make_shared<Run>(settings, dataset);
  auto* const trainer =
      new ga::Trainer(run->model, run->adamw, scored, ga::Validate(run->test, ga::Accuracy{}), std::move(policies)...);
  const std::shared_ptr<std::remove_pointer_t<decltype(trainer)>> owner(trainer);
  return {name, [run, owner] { owner->fit(run->batches); }, run->model->parameters()};
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
  const ga::ClipNorm clip{.max = 1.0};  // so that there is a norm
  harness::contest(
      "An epoch of FashionMNIST by the Trainer, validated at its end, AdamW",
      {contestant("TensorBoard, Report, MetricsLog, EarlyStopping", settings, dataset, clip,
                  ga::TensorBoard{.directory = folder / "runs"}, ga::Report{.path = folder / "run.html"},
                  ga::MetricsLog{.path = folder / "train.csv"}, ga::EarlyStopping{.patience = 1'000'000}),
       contestant("nobody looks", settings, dataset, clip),
       contestant("TensorBoard alone", settings, dataset, clip, ga::TensorBoard{.directory = folder / "alone"}),
       contestant("Report alone", settings, dataset, clip, ga::Report{.path = folder / "alone.html"}),
       contestant("MetricsLog alone", settings, dataset, clip, ga::MetricsLog{.path = folder / "alone.csv"})},
      programs::rows, "images", options);
  std::filesystem::remove_all(folder);
}
