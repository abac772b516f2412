// SPDX-License-Identifier: Apache-2.0
//
// Trains a little with many parts of the library, saves and loads it, and prints the bits of the result, which must be
// the same if the definitions are header-only and if they are compiled once.
#include <gradaccum/gradaccum.hpp>
#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iostream>

namespace ga = gradaccum;

namespace {

std::uint64_t bits_of(torch::nn::Module& model) {
  std::uint64_t hash = 0;
  for (auto& parameter : model.parameters()) {
    const auto numbers = parameter.detach().to(torch::kFloat).contiguous();
    for (std::int64_t i = 0; i < numbers.numel(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, numbers.data_ptr<float>() + i, sizeof bits);
      hash = hash * 1099511628211u + bits;
    }
  }
  return hash;
}

}  // namespace

int main(int, char* argv[]) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::GELU(), torch::nn::Linear(32, 1));
  auto x = torch::randn({96, 8}), y = x.sum(1, /*keepdim=*/true);
  ga::data::TensorBatches batches(x, y, {.batch_size = 8, .shuffle = true});
  ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(1e-3));
  const std::filesystem::path states = std::string(argv[0]) + ".states";
  std::filesystem::remove_all(states);
  ga::Trainer trainer(model, adamw,
      [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); },
      ga::Accumulate{.steps = 5}, ga::MixedPrecision{.dtype = torch::kHalf}, ga::ClipNorm{.max = 0.5},
      ga::Schedule{ga::lr::Cosine{.peak = 1e-3, .warmup = 2, .total = 20}}, ga::Ema{.decay = 0.9},
      ga::SaveState{.directory = states, .every_updates = 2});
  trainer.fit(batches, {.epochs = 2});
  std::cout << trainer.updates() << " updates: " << bits_of(*model);
  trainer.policy<ga::Ema>().swap(model);
  std::cout << ", averages: " << bits_of(*model) << ", loss " << trainer.evaluate(batches)["loss"];
  trainer.policy<ga::Ema>().swap(model);
  ga::load(states, trainer);
  std::cout << ", loaded: " << bits_of(*model) << "\ngradaccum " << GRADACCUM_VERSION_MAJOR << "."
            << GRADACCUM_VERSION_MINOR << ", LibTorch " << TORCH_VERSION << "\n";
}
