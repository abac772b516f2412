// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "options.hpp"

namespace {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<torch::Tensor> parameters,
                                                        double lr) {
  if (name == "adam") {
    return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(lr));
  }
  if (name == "sgd") {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(lr).momentum(0.9));
  }
  if (name == "rmsprop") {
    return std::make_unique<torch::optim::RMSprop>(std::move(parameters), torch::optim::RMSpropOptions(lr));
  }
  throw std::invalid_argument("unknown optimizer: " + name);
}

class Curve : public torch::data::datasets::Dataset<Curve> {
 public:
  explicit Curve(int64_t count) {
    auto generator = at::detail::createCPUGenerator(13);
    x_ = 4 * torch::rand({count, 2}, generator) - 2;
    y_ = torch::sin(x_.narrow(1, 0, 1)) * x_.narrow(1, 1, 1) + 0.05 * torch::randn({count, 1}, generator);
  }

  torch::data::Example<> get(size_t index) override { return {x_[index], y_[index]}; }

  std::optional<size_t> size() const override { return x_.size(0); }

 private:
  torch::Tensor x_, y_;
};

}  // namespace

int main(int argc, char* argv[]) {
  const auto options = adoption::parse(argc, argv);

  torch::nn::Sequential model(torch::nn::Linear(2, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 1));
  auto optimizer = make_optimizer("adam", model->parameters(), 0.01);
  torch::optim::StepLR scheduler(*optimizer, /*step_size=*/1, /*gamma=*/0.5);

  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Curve(64).map(torch::data::transforms::Stack<>()), options.batch_size);

  for (int epoch = 1; epoch <= 2; ++epoch) {
    double total = 0;
    int64_t rows = 0;
    for (auto& batch : *loader) {
      optimizer->zero_grad();
      auto loss = torch::mse_loss(model->forward(batch.data), batch.target);
      loss.backward();
      optimizer->step();
      total += loss.item<double>() * static_cast<double>(batch.data.size(0));
      rows += batch.data.size(0);
    }
    scheduler.step();
    std::printf("epoch %d: loss %.4f\n", epoch, total / static_cast<double>(rows));
  }
  adoption::save(options, model->parameters());
}
