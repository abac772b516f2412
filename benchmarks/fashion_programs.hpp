// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <gradaccum/autocast.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <memory>
#include <string>

#include "dataset.hpp"
#include "model.hpp"

/// Programs that train the network of the FashionMNIST example (784-512-512-10), batch 64, each as it would be written.
namespace fashion_programs {

namespace ga = gradaccum;

constexpr std::int64_t rows = 60'000, batch_size = 64;

struct Settings {
  std::string data = "build/data/unzipped";  ///< LibTorch's own dataset does not read .gz
  std::uint64_t seed = 0;
};

struct Program {
  std::string name;
  torch::nn::Sequential model;
  std::function<void()> epoch;
};

inline torch::nn::Sequential make_model(const Settings& settings) {
  torch::manual_seed(settings.seed);
  return fashion_mnist::make_model();
}

/// Ours, float32 or, with autocast, bfloat16.
template <class Optimizer, class Options>
Program ours(const Settings& settings, const fashion_mnist::Split& train, const Options& hyper, bool bfloat16 = false) {
  auto model = make_model(settings);
  auto optimizer = std::make_shared<Optimizer>(model->parameters(), hyper);
  auto accumulator = std::make_shared<ga::GradAccumulator<Optimizer>>(*optimizer);
  ga::data::TensorBatches batches(train.images, train.labels,
                                  {.batch_size = batch_size, .shuffle = true, .seed = settings.seed});
  auto epoch = [=]() mutable {
    for (auto& batch : batches) {
      auto loss = [&] {
        ga::Autocast autocast(torch::kCPU, torch::kBFloat16, bfloat16);
        return torch::cross_entropy_loss(model->forward(batch.data), batch.target);
      }();
      loss.backward();
      accumulator->step();
      accumulator->zero_grad();
    }
    (void)optimizer;  // the accumulator only refers to it
  };
  return {std::string("ga::optim::") + Optimizer::name + ", TensorBatches" + (bfloat16 ? ", bfloat16" : ""), model,
          epoch};
}

/// LibTorch's, as its own example has it: MNIST, DataLoader, torch::optim.
template <class Optimizer, class Options>
Program libtorch(const Settings& settings, const std::string& name, const Options& hyper) {
  auto model = make_model(settings);
  auto optimizer = std::make_shared<Optimizer>(model->parameters(), hyper);
  auto dataset = torch::data::datasets::MNIST(settings.data).map(torch::data::transforms::Stack<>());
  std::shared_ptr loader =
      torch::data::make_data_loader<torch::data::samplers::RandomSampler>(std::move(dataset), batch_size);
  auto epoch = [=]() mutable {
    for (auto& batch : *loader) {
      optimizer->zero_grad();
      torch::cross_entropy_loss(model->forward(batch.data), batch.target).backward();
      optimizer->step();
    }
  };
  return {"torch::optim::" + name + ", MNIST, DataLoader", model, epoch};
}

/// Of the test images, in per cent.
inline double accuracy(torch::nn::Sequential model, const fashion_mnist::Split& test) {
  torch::NoGradGuard no_grad;
  return 100 * model->forward(test.images).argmax(1).eq(test.labels).to(torch::kDouble).mean().item<double>();
}

}  // namespace fashion_programs
