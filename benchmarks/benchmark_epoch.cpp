// SPDX-License-Identifier: Apache-2.0
//
// One epoch of the FashionMNIST network (784-512-512-10, batch 64, 60000 images): our loop against the idiomatic
// LibTorch loop, a Dataset behind a DataLoader. Bound: forward and backward alone, on one batch that is always there.

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/grad_accumulator.hpp>

#include "harness.hpp"

namespace ga = gradaccum;

namespace {

constexpr std::int64_t rows = 60'000, batch_size = 64;

/// What `torch::data::datasets::MNIST` does, without its files.
struct Images : torch::data::datasets::Dataset<Images> {
  Images(at::Tensor data, at::Tensor target) : data(std::move(data)), target(std::move(target)) {}
  torch::data::Example<> get(std::size_t index) override { return {data[index], target[index]}; }
  c10::optional<std::size_t> size() const override { return data.size(0); }
  at::Tensor data, target;
};

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(784, 512), torch::nn::ReLU(), torch::nn::Linear(512, 512),
                               torch::nn::ReLU(), torch::nn::Linear(512, 10));
}

template <class Optimizer, class Options>
void compare(const std::string& name, Options hyper, at::Tensor data, at::Tensor target,
             const harness::Options& options) {
  auto ours = make_model(), peer = make_model(), bound = make_model();
  Optimizer our_optimizer(ours->parameters(), hyper), peer_optimizer(peer->parameters(), hyper);
  ga::GradAccumulator accumulator(our_optimizer);
  ga::data::TensorBatches batches(data, target, {.batch_size = batch_size, .shuffle = true});
  const auto our_epoch = [&] {
    for (auto& batch : batches) {
      torch::cross_entropy_loss(ours->forward(batch.data), batch.target).backward();
      accumulator.step();
      accumulator.zero_grad();
    }
  };
  const auto peer_epoch = [&] {
    auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
        Images(data, target).map(torch::data::transforms::Stack<>()), torch::data::DataLoaderOptions(batch_size));
    for (auto& batch : *loader) {
      peer_optimizer.zero_grad();
      torch::cross_entropy_loss(peer->forward(batch.data), batch.target).backward();
      peer_optimizer.step();
    }
  };
  const auto x = data.narrow(0, 0, batch_size), y = target.narrow(0, 0, batch_size);
  const auto bound_epoch = [&] {
    for (std::int64_t i = 0; i < rows / batch_size; ++i) {
      torch::cross_entropy_loss(bound->forward(x), y).backward();
      bound->zero_grad();
    }
  };
  harness::contest("One epoch, batch 64, " + name,
                   {{"TensorBatches, GradAccumulator", our_epoch},
                    {"Dataset, DataLoader, torch::optim", peer_epoch},
                    {"bound: forward and backward alone", bound_epoch}},
                   rows, "samples", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "One epoch of a small network against the idiomatic LibTorch loop");
  const auto data = torch::rand({rows, 784}), target = torch::randint(10, {rows});
  compare<torch::optim::SGD>("SGD", torch::optim::SGDOptions(1e-3), data, target, options);
  compare<torch::optim::AdamW>("AdamW", torch::optim::AdamWOptions(1e-3), data, target, options);
}
