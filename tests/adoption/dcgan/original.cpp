// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>

#include "options.hpp"

namespace {

namespace nn = torch::nn;

class Images : public torch::data::datasets::Dataset<Images> {
  torch::Tensor images, noise;

 public:
  Images() {
    auto generator = at::detail::createCPUGenerator(3);
    auto line = torch::linspace(-1, 1, 6).square();
    images = 2 * torch::exp(-(line.view({6, 1}) + line) / (0.2 + torch::rand({64, 1, 1, 1}, generator))) - 1;
    noise = torch::randn({64, 8, 1, 1}, generator);
  }
  torch::data::Example<> get(size_t index) override { return {images[index], noise[index]}; }
  std::optional<size_t> size() const override { return images.size(0); }
};

}  // namespace

int main(int argc, char* argv[]) {
  const auto options = adoption::parse(argc, argv);

  nn::Sequential generator(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 16, 3).bias(false)), nn::GroupNorm(4, 16),
                           nn::ReLU(), nn::ConvTranspose2d(nn::ConvTranspose2dOptions(16, 1, 4).stride(2).padding(1)),
                           nn::Tanh());
  nn::Sequential discriminator(nn::Conv2d(nn::Conv2dOptions(1, 16, 4).stride(2).padding(1)),
                               nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                               nn::Conv2d(nn::Conv2dOptions(16, 16, 3).padding(1).bias(false)), nn::GroupNorm(4, 16),
                               nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                               nn::Conv2d(nn::Conv2dOptions(16, 1, 3)), nn::Flatten());

  auto data_loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Images().map(torch::data::transforms::Stack<>()), options.batch_size);

  torch::optim::Adam generator_optimizer(generator->parameters(), torch::optim::AdamOptions(2e-3).betas({0.5, 0.999}));
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(),
                                             torch::optim::AdamOptions(2e-3).betas({0.5, 0.999}));

  for (int epoch = 1; epoch <= 2; ++epoch) {
    torch::Tensor d_loss, g_loss;
    for (auto& batch : *data_loader) {
      generator_optimizer.zero_grad();
      discriminator_optimizer.zero_grad();
      auto real_labels = torch::ones({batch.data.size(0), 1});
      auto fake_labels = torch::zeros({batch.data.size(0), 1});

      auto fake = generator->forward(batch.target);
      auto d_loss_real = torch::binary_cross_entropy_with_logits(discriminator->forward(batch.data), real_labels);
      d_loss_real.backward();
      auto d_loss_fake = torch::binary_cross_entropy_with_logits(discriminator->forward(fake.detach()), fake_labels);
      d_loss_fake.backward();
      d_loss = d_loss_real + d_loss_fake;

      g_loss = torch::binary_cross_entropy_with_logits(discriminator->forward(fake), real_labels);
      g_loss.backward({}, {}, /*create_graph=*/false, generator->parameters());

      discriminator_optimizer.step();
      generator_optimizer.step();
    }
    std::printf("[%d/2] D_loss: %.4f | G_loss: %.4f\n", epoch, d_loss.item<double>(), g_loss.item<double>());
  }

  auto parameters = generator->parameters();
  for (const auto& parameter : discriminator->parameters()) parameters.push_back(parameter);
  adoption::save(options, parameters);
}
