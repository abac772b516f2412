// SPDX-License-Identifier: Apache-2.0
// An image classifier, trained in a loop of your own.
//
//     ./own_loop DATA [EPOCHS [FOLDER]]     DATA has the unzipped files of FashionMNIST or MNIST. With a folder, saves
//                                           there, and resumes from its newest state
//
// For a task of your own, change make_model, read and loss_of.
#include <torch/torch.h>
#include <gradaccum/gradaccum.hpp>

#include <cstdint>
#include <iostream>
#include <string>

namespace ga = gradaccum;
using torch::data::datasets::MNIST;

const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;

torch::nn::Sequential make_model() {
  using namespace torch::nn;
  return Sequential(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), ReLU(), MaxPool2d(2),
                    Conv2d(Conv2dOptions(16, 32, 3).padding(1)), ReLU(), MaxPool2d(2), Flatten(),
                    Linear(32 * 7 * 7, 10));
}

ga::data::TensorBatches read(const std::string& folder, MNIST::Mode mode, ga::data::TensorBatchesOptions options) {
  const MNIST set(folder, mode);
  return {set.images().to(device), set.targets().to(device), options};
}

ga::Loss loss_of(torch::nn::Sequential& model, const ga::data::Batch& batch) {
  const ga::Autocast autocast(device, torch::kBFloat16, ga::is_bf16_fast(device));
  const auto output = model->forward(batch.data);
  return ga::Loss{torch::cross_entropy_loss(output, batch.target), batch.target.size(0)}.with(output, batch.target);
}

struct Training {
  ga::data::TensorBatches batches;
  torch::nn::Sequential model = make_model();
  ga::optim::AdamW adamw{model->parameters(), ga::optim::AdamWOptions(1e-3)};
  ga::GradAccumulator<ga::optim::AdamW> optimizer{adamw, {.steps = 4}};  // 4 x 16: an effective batch of 64
  ga::LearningRates rates{optimizer};
  std::int64_t epoch = 0;

  explicit Training(const std::string& data)
      : batches(read(data, MNIST::Mode::kTrain, {.batch_size = 16, .shuffle = true, .seed = 1})) {
    model->to(device);
  }

  std::int64_t updates() const { return optimizer.updates(); }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(model));
    archive("optimizer", ga::OptimizerState(optimizer, model));
    archive("batches", batches);
    archive("random", ga::RandomState());
    archive("epoch", epoch);
  }
};

void train_epoch(Training& training, const ga::lr::Cosine& rate, const std::string& folder) {
  auto& [batches, model, adamw, optimizer, rates, epoch] = training;
  ga::MeanLoss mean;
  model->train();
  for (const auto& batch : batches) {  // resumes where the state was saved
    rates.set(rate(optimizer.updates()));
    const auto loss = loss_of(model, batch);
    optimizer.backward(loss);
    optimizer.clip_grad_norm_(1.0);
    const bool updated = optimizer.step();  // every 4th time
    optimizer.zero_grad();
    mean.add(loss);
    if (!updated || optimizer.updates() % 250 != 0) continue;
    std::cout << "update " << optimizer.updates() << ": loss " << mean.value() << std::endl;
    mean = {};
    if (!folder.empty()) ga::save(folder, training, {.keep_last = 2});
  }
  optimizer.flush();  // a last window of fewer micro-batches
  ++epoch;
}

double accuracy(Training& training, ga::data::TensorBatches& batches) {
  const torch::NoGradGuard no_grad;
  training.model->eval();
  ga::Accuracy accuracy;
  for (const auto& batch : batches) accuracy.add(loss_of(training.model, batch));
  return accuracy.value();
}

int main(int argc, char** argv) try {
  if (argc < 2 || argv[1] == std::string("--help")) {
    std::cout << "usage: own_loop DATA [EPOCHS [FOLDER]]\n";
    return argc < 2 ? 1 : 0;
  }
  const std::string data = argv[1], folder = argc > 3 ? argv[3] : "";
  const std::int64_t epochs = argc > 2 ? std::stoll(argv[2]) : 2;
  torch::manual_seed(1);
  Training training(data);
  auto test_batches = read(data, MNIST::Mode::kTest, {.batch_size = 500});
  ga::load(folder, training, {.if_any = true});
  const auto updates_of_epoch = (training.batches.rows() + 63) / 64;
  const ga::lr::Cosine rate{.peak = 1e-3, .warmup = 100, .total = epochs * updates_of_epoch};
  while (training.epoch < epochs) {
    train_epoch(training, rate, folder);
    std::cout << "epoch " << training.epoch << ": accuracy " << accuracy(training, test_batches) << std::endl;
  }
} catch (const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  std::cerr << "own_loop: " << (torch ? torch->what_without_backtrace() : error.what())
            << "; --help shows the arguments\n";
  return 1;
}
