// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>
#include <gradaccum/grad_accumulator.hpp>

#include <cstdio>

#include "options.hpp"

namespace {

struct Net : torch::nn::Module {
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(1, 6, 3));
  torch::nn::Conv2d conv2 = register_module("conv2", torch::nn::Conv2d(6, 12, 2));
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(48, 4));
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1->forward(x), 2));
    x = torch::relu(torch::max_pool2d(conv2->forward(x), 2));
    return torch::log_softmax(fc->forward(x.view({-1, 48})), /*dim=*/1);
  }
};

class Digits : public torch::data::datasets::Dataset<Digits> {
  torch::Tensor images, targets;

 public:
  Digits() {
    auto generator = at::detail::createCPUGenerator(1);
    auto prototypes = torch::randn({4, 1, 12, 12}, generator);
    targets = torch::randint(0, 4, {64}, generator, torch::kLong);
    images = prototypes.index_select(0, targets) + 0.5 * torch::randn({64, 1, 12, 12}, generator);
  }
  torch::data::Example<> get(size_t index) override { return {images[index], targets[index]}; }
  std::optional<size_t> size() const override { return images.size(0); }
};

template <typename DataLoader>
void train(std::size_t epoch, Net& model, torch::Device device, DataLoader& loader,
           torch::optim::Optimizer& optimizer) {
  model.train();
  for (auto& batch : loader) {
    optimizer.zero_grad();
    torch::nll_loss(model.forward(batch.data.to(device)), batch.target.to(device)).backward();
    optimizer.step();
  }
  std::printf("Epoch %zu", epoch);
}

template <typename DataLoader>
void test(Net& model, torch::Device device, DataLoader& loader) {
  torch::NoGradGuard no_grad;
  model.eval();
  int64_t correct = 0, total = 0;
  for (const auto& batch : loader) {
    auto prediction = model.forward(batch.data.to(device)).argmax(1);
    correct += prediction.eq(batch.target.to(device)).sum().template item<int64_t>();
    total += prediction.size(0);
  }
  std::printf(" | Accuracy: %.3f\n", static_cast<double>(correct) / static_cast<double>(total));
}

}  // namespace

int main(int argc, char* argv[]) {
  const auto options = adoption::parse(argc, argv);
  torch::Device device(torch::kCPU);
  Net model;
  model.to(device);
  auto dataset = Digits().map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(dataset, options.batch_size);
  torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  gradaccum::GradAccumulator optimizer(sgd, {.steps = options.steps});
  for (size_t epoch = 1; epoch <= 2; ++epoch) {
    train(epoch, model, device, *loader, optimizer);
    optimizer.flush();
    test(model, device, *loader);
  }
  adoption::save(options, model.parameters());
}
