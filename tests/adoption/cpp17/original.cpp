// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "options.hpp"

namespace {

struct Net : torch::nn::Module {
  Net() {
    fc1 = register_module("fc1", torch::nn::Linear(6, 24));
    fc2 = register_module("fc2", torch::nn::Linear(24, 2));
  }

  torch::Tensor forward(const torch::Tensor& x) { return fc2->forward(torch::tanh(fc1->forward(x))); }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};

class Learner {
 public:
  Learner(std::shared_ptr<Net> net, double lr)
      : net_(std::move(net)), optimizer_(net_->parameters(), torch::optim::SGDOptions(lr).momentum(0.9)) {}

  void fit(const std::vector<std::pair<torch::Tensor, torch::Tensor>>& batches) {
    net_->train();
    double total = 0;
    for (const auto& [inputs, targets] : batches) {
      optimizer_.zero_grad();
      torch::Tensor loss = torch::mse_loss(net_->forward(inputs), targets);
      loss.backward();
      optimizer_.step();
      total += loss.item<double>();
    }
    loss_ = total / static_cast<double>(batches.size());
  }

  double loss() const { return loss_; }

 private:
  std::shared_ptr<Net> net_;
  torch::optim::SGD optimizer_;
  double loss_ = 0;
};

}  // namespace

int main(int argc, char* argv[]) {
  const adoption::Options options = adoption::parse(argc, argv);

  at::Generator generator = at::detail::createCPUGenerator(17);
  const torch::Tensor inputs = torch::randn({64, 6}, generator);
  const torch::Tensor targets = torch::sin(torch::matmul(inputs, torch::randn({6, 2}, generator)));
  std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;
  for (int64_t start = 0; start < inputs.size(0); start += options.batch_size) {
    const int64_t end = start + options.batch_size;
    batches.emplace_back(inputs.slice(0, start, end), targets.slice(0, start, end));
  }

  auto net = std::make_shared<Net>();
  Learner learner(net, 0.05);
  for (int epoch = 1; epoch <= 2; ++epoch) {
    learner.fit(batches);
    std::printf("epoch %d: loss %.4f\n", epoch, learner.loss());
  }
  adoption::save(options, net->parameters());
}
