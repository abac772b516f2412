// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "options.hpp"

namespace {

struct Classifier : torch::nn::Module {
  torch::nn::Sequential backbone = register_module(
      "backbone", torch::nn::Sequential(torch::nn::Linear(10, 32), torch::nn::ReLU(), torch::nn::Linear(32, 32),
                                        torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})), torch::nn::ReLU(),
                                        torch::nn::Linear(32, 16), torch::nn::ReLU()));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(16, 3));

  torch::Tensor forward(torch::Tensor x) { return head->forward(backbone->forward(x)); }
};

torch::optim::OptimizerParamGroup group(const std::vector<torch::Tensor>& parameters, double lr, double weight_decay) {
  return {parameters,
          std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr).weight_decay(weight_decay))};
}

}  // namespace

int main(int argc, char* argv[]) {
  const auto options = adoption::parse(argc, argv);

  auto generator = at::detail::createCPUGenerator(11);
  const auto features = torch::randn({64, 10}, generator);
  const auto labels = torch::matmul(features, torch::randn({10, 3}, generator)).argmax(1);

  auto model = std::make_shared<Classifier>();
  std::vector<torch::Tensor> frozen, trainable;
  for (size_t i = 0; i < model->backbone->size(); ++i) {
    for (auto& parameter : model->backbone[i]->parameters()) (i < 3 ? frozen : trainable).push_back(parameter);
  }
  for (auto& parameter : frozen) parameter.requires_grad_(false);

  const std::vector<double> learning_rates = {1e-3, 1e-2};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.push_back(group(trainable, learning_rates[0], 0.01));
  groups.push_back(group(model->head->parameters(), learning_rates[1], 0.1));
  torch::optim::AdamW optimizer(groups);

  const int64_t warmup_updates = 6;
  int64_t updates = 0;
  for (int epoch = 1; epoch <= 2; ++epoch) {
    torch::Tensor loss;
    for (int64_t start = 0; start < features.size(0); start += options.batch_size) {
      const auto end = start + options.batch_size;
      optimizer.zero_grad();
      loss = torch::nn::functional::cross_entropy(model->forward(features.slice(0, start, end)),
                                                  labels.slice(0, start, end));
      loss.backward();

      ++updates;
      const double factor = std::min(1.0, static_cast<double>(updates) / static_cast<double>(warmup_updates));
      for (size_t i = 0; i < learning_rates.size(); ++i) {
        optimizer.param_groups()[i].options().set_lr(factor * learning_rates[i]);
      }
      optimizer.step();
    }
    std::printf("epoch %d: loss %.4f\n", epoch, loss.item<double>());
  }
  adoption::save(options, model->parameters());
}
