// SPDX-License-Identifier: Apache-2.0
// A generative adversarial network: two networks, two optimizers, and losses that alternate.
//
//     ./gan DATA [EPOCHS [FOLDER]]     DATA has the unzipped files of FashionMNIST or MNIST. With a folder, saves
//     there,
//                                      and resumes from its newest state. Writes images to generated.pgm
//
// For a task of your own, change Gan and the data.
#include <torch/torch.h>
#include <gradaccum/gradaccum.hpp>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <string>

namespace ga = gradaccum;

constexpr std::int64_t noise = 64, pixels = 28 * 28;

struct GanImpl : torch::nn::Module {
  torch::nn::Sequential generator =
      register_module("generator", torch::nn::Sequential(torch::nn::Linear(noise, 256), torch::nn::LeakyReLU(),
                                                         torch::nn::Linear(256, 512), torch::nn::LeakyReLU(),
                                                         torch::nn::Linear(512, pixels), torch::nn::Tanh()));
  torch::nn::Sequential discriminator =
      register_module("discriminator", torch::nn::Sequential(torch::nn::Linear(pixels, 512), torch::nn::LeakyReLU(),
                                                             torch::nn::Dropout(0.3), torch::nn::Linear(512, 256),
                                                             torch::nn::LeakyReLU(), torch::nn::Dropout(0.3),
                                                             torch::nn::Linear(256, 1)));
};
TORCH_MODULE(Gan);

struct Training {
  Gan gan;
  ga::data::TensorBatches batches;
  ga::optim::Adam generator_adam{gan->generator->parameters(), ga::optim::AdamOptions(2e-4).betas({0.5, 0.999})};
  ga::optim::Adam discriminator_adam{gan->discriminator->parameters(),
                                     ga::optim::AdamOptions(2e-4).betas({0.5, 0.999})};
  ga::GradAccumulator<ga::optim::Adam> of_generator{generator_adam, {.steps = 2}};  // 2 x 32: batches of 64
  ga::GradAccumulator<ga::optim::Adam> of_discriminator{discriminator_adam, {.steps = 2}};
  std::int64_t epoch = 0;

  explicit Training(const at::Tensor& images)
      : batches(images.flatten(1) * 2 - 1, torch::empty({images.size(0), 0}),
                {.batch_size = 32, .shuffle = true, .seed = 1}) {}

  /// Trains both networks on real images, and on as many that are generated.
  void step(const at::Tensor& real, ga::MeanLoss& generator_loss, ga::MeanLoss& discriminator_loss) {
    const auto rows = real.size(0);
    const auto generated = gan->generator->forward(torch::randn({rows, noise}));
    const auto on_real = gan->discriminator->forward(real),
               on_generated = gan->discriminator->forward(generated.detach());
    const ga::Loss of_d{torch::softplus(-on_real).mean() + torch::softplus(on_generated).mean(), rows};
    of_discriminator.backward(of_d);
    const ga::Loss of_g{torch::softplus(-gan->discriminator->forward(generated)).mean(), rows};
    of_generator.backward(of_g, {.inputs = gan->generator->parameters()});  // passes through the discriminator
    of_discriminator.step();
    of_generator.step();
    of_discriminator.zero_grad();
    of_generator.zero_grad();
    discriminator_loss.add(of_d);
    generator_loss.add(of_g);
  }

  std::int64_t updates() const { return of_generator.updates(); }
  void state(ga::Archive& archive) {
    archive("gan", ga::ModelState(gan));
    archive("of_generator", ga::OptimizerState(of_generator, gan));
    archive("of_discriminator", ga::OptimizerState(of_discriminator, gan));
    archive("batches", batches);
    archive("random", ga::RandomState());
    archive("epoch", epoch);
  }
};

/// Writes 8 x 8 images to a file that most viewers show.
void draw(Gan& gan, const std::string& path) {
  const torch::NoGradGuard no_grad;
  const auto images = gan->generator->forward(torch::randn({64, noise})).view({8, 8, 28, 28}).permute({0, 2, 1, 3});
  const auto gray = ((images + 1) * 127.5).to(torch::kUInt8).contiguous();
  std::ofstream(path, std::ios::binary) << "P5 224 224 255\n"
                                        << std::string(static_cast<const char*>(gray.const_data_ptr()), gray.nbytes());
}

int main(int argc, char** argv) try {
  if (argc < 2 || argv[1] == std::string("--help")) {
    std::cout << "usage: gan DATA [EPOCHS [FOLDER]]\n";
    return argc < 2 ? 1 : 0;
  }
  const std::string folder = argc > 3 ? argv[3] : "";
  const std::int64_t epochs = argc > 2 ? std::stoll(argv[2]) : 3;
  torch::manual_seed(1);
  Training training(torch::data::datasets::MNIST(argv[1]).images());
  ga::load(folder, training, {.if_any = true});
  while (training.epoch < epochs) {
    ga::MeanLoss generator_loss, discriminator_loss;
    for (const auto& batch : training.batches) {
      training.step(batch.data, generator_loss, discriminator_loss);
      const bool between_windows = training.of_generator.micro_steps() == 0;
      if (between_windows && training.updates() % 200 == 0 && !folder.empty())
        ga::save(folder, training, {.keep_last = 2});
    }
    training.of_discriminator.flush();
    training.of_generator.flush();
    std::cout << "epoch " << ++training.epoch << ": loss of the generator " << generator_loss.value()
              << ", of the discriminator " << discriminator_loss.value() << std::endl;
    draw(training.gan, "generated.pgm");
  }
} catch (const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  std::cerr << "gan: " << (torch ? torch->what_without_backtrace() : error.what()) << "; --help shows the arguments\n";
  return 1;
}
