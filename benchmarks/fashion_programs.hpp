// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <memory>
#include <stdexcept>
#include <string>

#include "dataset.hpp"
#include "model.hpp"

/// Programs that train the network of the FashionMNIST example (784-512-512-10) in batches of 64, in idiomatic code.
namespace fashion_programs {

namespace ga = gradaccum;

constexpr std::int64_t rows = 60'000, batch_size = 64;

struct Settings {
  std::string data = "build/data/unzipped";  ///< LibTorch's own dataset does not read .gz
  std::uint64_t seed = 0;
  std::string compiled_step = {};  ///< a folder, for ours; empty: eager steps
};

/// Mean and deviation of the pixels, which all programs normalize.
constexpr double mean = 0.2860, deviation = 0.3530;

struct Program {
  std::string name;
  torch::nn::Sequential model;
  std::function<void()> epoch;
  std::function<double()> accuracy;  ///< on the test images, in percent
};

inline torch::nn::Sequential make_model(const Settings& settings) {
  torch::manual_seed(settings.seed);
  return fashion_mnist::make_layers(/*depth=*/2);
}

inline double accuracy_of(torch::nn::Sequential& model, const at::Tensor& images, const at::Tensor& labels) {
  torch::NoGradGuard no_grad;
  return 100 * model->forward(images).argmax(1).eq(labels).to(torch::kDouble).mean().item<double>();
}

inline at::Tensor objective(torch::nn::Sequential& model, const ga::data::Batch& batch) {
  return torch::cross_entropy_loss(model->forward(batch.data), batch.target);
}

/// Records the step of `ours` in a folder, for gradaccum-compile-step.
inline ga::SavedStep record_step(const std::string& folder, bool bfloat16) {
  auto model = make_model({});
  const ga::data::Batch batch{torch::randn({batch_size, 28, 28}),
                              torch::randint(10, {batch_size}, at::TensorOptions(torch::kLong))};
  const ga::Autocast autocast(torch::kCPU, torch::kBFloat16, bfloat16);
  return ga::save_step(model, objective, batch, folder);
}

/// Returns the objective, or its compiled step.
inline std::function<at::Tensor(const ga::data::Batch&)> loss_of(torch::nn::Sequential model,
                                                                 const std::string& compiled_step) {
  const auto held = std::make_shared<torch::nn::Sequential>(std::move(model));
  if (compiled_step.empty()) return [held](auto& batch) { return objective(*held, batch); };
  return [held, step = ga::CompiledStep(*held, objective, compiled_step)](auto& batch) mutable {
    auto loss = step(batch);
    if (step.report().eager > 0) throw std::runtime_error("what was to be compiled was not");
    return loss;
  };
}

/// Our program, in float32 or with autocast to bfloat16. The data set is in memory and normalized as a whole.
template <class Optimizer, class Options>
Program ours(const Settings& settings, const Options& hyper, bool bfloat16 = false) {
  auto dataset = fashion_mnist::load_dataset(settings.data);
  for (auto* images : {&dataset.train.images, &dataset.test.images}) images->sub_(mean).div_(deviation);
  auto model = make_model(settings);
  auto optimizer = std::make_shared<Optimizer>(model->parameters(), hyper);
  auto accumulator = std::make_shared<ga::GradAccumulator<Optimizer>>(*optimizer);
  ga::data::TensorBatches batches(dataset.train.images, dataset.train.labels,
                                  {.batch_size = batch_size, .shuffle = true, .seed = settings.seed});
  auto epoch = [=, of = loss_of(model, settings.compiled_step)]() mutable {
    for (auto& batch : batches) {
      auto loss = [&] {
        ga::Autocast autocast(torch::kCPU, torch::kBFloat16, bfloat16);
        return of(batch);
      }();
      loss.backward();
      accumulator->step();
      accumulator->zero_grad();
    }
    (void)optimizer;  // kept alive for the accumulator
  };
  auto accuracy = [=, test = dataset.test]() mutable { return accuracy_of(model, test.images, test.labels); };
  return {std::string("ga::optim::") + Optimizer::name + ", TensorBatches" +
              (settings.compiled_step.empty() ? "" : ", CompiledStep") + (bfloat16 ? ", bfloat16" : ""),
          model, epoch, accuracy};
}

/// Makes LibTorch's loader for a part of the data set, which normalizes image by image.
template <class Sampler>
auto make_loader(const Settings& settings, torch::data::datasets::MNIST::Mode mode, std::int64_t images_a_batch) {
  auto dataset = torch::data::datasets::MNIST(settings.data, mode)
                     .map(torch::data::transforms::Normalize<>(mean, deviation))
                     .map(torch::data::transforms::Stack<>());
  return std::shared_ptr(torch::data::make_data_loader<Sampler>(std::move(dataset), images_a_batch));
}

inline auto make_test_loader(const Settings& settings) {
  return make_loader<torch::data::samplers::SequentialSampler>(settings, torch::data::datasets::MNIST::Mode::kTest,
                                                               /*images_a_batch=*/10'000);
}

/// LibTorch's program, like PyTorch's C++ example for MNIST: the dataset, a DataLoader and torch::optim. The example
/// reads the test images before training, which happens to make glibc keep memory of a batch's size; with `test_later`,
/// glibc returns the memory to the kernel and allocates it again in every batch.
template <class Optimizer, class Options>
Program libtorch(const Settings& settings, const std::string& name, const Options& hyper, bool test_later = false) {
  using Loader = decltype(make_test_loader(settings));
  auto train = make_loader<torch::data::samplers::RandomSampler>(settings, torch::data::datasets::MNIST::Mode::kTrain,
                                                                 batch_size);
  auto test = test_later ? Loader() : make_test_loader(settings);
  auto model = make_model(settings);
  auto optimizer = std::make_shared<Optimizer>(model->parameters(), hyper);
  auto epoch = [=]() mutable {
    for (auto& batch : *train) {
      optimizer->zero_grad();
      torch::cross_entropy_loss(model->forward(batch.data), batch.target).backward();
      optimizer->step();
    }
  };
  auto accuracy = [=]() mutable {
    if (!test) test = make_test_loader(settings);
    auto all = test->begin();
    return accuracy_of(model, all->data, all->target);
  };
  return {"torch::optim::" + name + ", MNIST, DataLoader" + (test_later ? ", test later" : ""), model, epoch, accuracy};
}

}  // namespace fashion_programs
