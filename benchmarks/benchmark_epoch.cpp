// SPDX-License-Identifier: Apache-2.0
//
// One epoch of FashionMNIST in batches of 64: our loop, compared to the idiomatic LibTorch loop with the MNIST dataset
// and a DataLoader. Bound: forward and backward alone, in float32, on one batch that stays in memory.
//
// All share one malloc here, so --keep-memory affects the peer, too. fashion_epoch runs each in a separate process.

#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "fashion_programs.hpp"
#include "harness.hpp"

namespace {

using namespace fashion_programs;

void contest(const std::string& title, const std::vector<Program>& programs, const harness::Options& options) {
  auto bound = fashion_mnist::make_layers(/*depth=*/2);
  const auto x = torch::randn({batch_size, 1, 28, 28}), y = torch::randint(10, {batch_size});
  const auto forward_and_backward = [&] {
    for (std::int64_t i = 0; i < rows / batch_size; ++i) {
      torch::cross_entropy_loss(bound->forward(x), y).backward();
      bound->zero_grad();
    }
  };
  std::vector<harness::Contestant> contestants;
  for (auto& program : programs) contestants.push_back({program.name, program.epoch});
  contestants.push_back({.name = "bound: forward and backward alone", .run = forward_and_backward, .bound = true});
  harness::contest(title, contestants, rows, "images", options);
  fmt::print("  after as many epochs each:");
  for (auto& program : programs) fmt::print("  {:.1f} %", program.accuracy());
  fmt::print(" of the test images\n");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  const auto options = harness::parse(argc, argv, "One epoch of FashionMNIST against LibTorch's idiomatic loop",
                                      [&](CLI::App& app) { app.add_option("--data", settings.data, "the data set"); });
  const torch::optim::SGDOptions sgd(0.1);
  const torch::optim::AdamWOptions adamw(3e-4);
  contest("One epoch, SGD", {ours<ga::optim::SGD>(settings, sgd), libtorch<torch::optim::SGD>(settings, "SGD", sgd)},
          options);
  std::vector<Program> programs{ours<ga::optim::AdamW>(settings, adamw),
                                libtorch<torch::optim::AdamW>(settings, "AdamW", adamw)};
  if (ga::is_bf16_fast(at::kCPU)) programs.push_back(ours<ga::optim::AdamW>(settings, adamw, /*bfloat16=*/true));
  contest("One epoch, AdamW", programs, options);
}
