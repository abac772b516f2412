// SPDX-License-Identifier: Apache-2.0
//
// An update of FashionMNIST's network on a CUDA device, by one batch of 64 that lies there: LibTorch's loop, ours, and
// ours in float16 with clipping and a loss scale on the device. The host goes ahead of the device, as in a training.

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <functional>

#include "../examples/fashion_mnist/model.hpp"
#include "card.hpp"
#include "harness.hpp"

namespace ga = gradaccum;
using harness::device;

namespace {

struct Program {
  Program() {
    torch::manual_seed(0);
    network = fashion_mnist::Network(/*depth=*/2);
    network->to(device);
    images = torch::rand({64, fashion_mnist::image_side, fashion_mnist::image_side}).to(device);
    labels = torch::randint(fashion_mnist::class_count, {64}, torch::kLong).to(device);
  }
  at::Tensor loss() { return torch::cross_entropy_loss(network->forward(images), labels); }
  at::Tensor loss_in_float16() {
    const ga::Autocast autocast(device, torch::kHalf);
    return loss();
  }

  fashion_mnist::Network network = nullptr;
  at::Tensor images, labels;
};

struct LibTorchs : Program {
  void update() {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step();
  }

  torch::optim::AdamW optimizer{network->parameters(), torch::optim::AdamWOptions(1e-3)};
};

struct Ours : Program {
  void end_update() {
    window.step();
    window.zero_grad();
  }
  void update() {
    loss().backward();
    end_update();
  }

  ga::optim::AdamW optimizer{network->parameters(), ga::optim::AdamWOptions(1e-3)};
  ga::GradAccumulator<ga::optim::AdamW> window{optimizer};
};

struct WithAutocast : Ours {
  void update() {
    loss_in_float16().backward();
    end_update();
  }
};

struct WithAll : Ours {
  void update() {
    scaler.scale(loss_in_float16()).backward();
    window.clip_grad_norm_(1.0);
    scaler.step(window);
    scaler.update();
    window.zero_grad();
  }

  ga::AmpScaler scaler{{.on_device = true}};
};

struct WithoutStep : Program {
  void update() {
    loss().backward();
    network->zero_grad();
  }
};

template <class Way>
harness::Contestant contestant(const std::string& name, Way& way, bool compared = false) {
  return {name, [&way] { way.update(); }, compared ? way.network->parameters() : std::vector<at::Tensor>()};
}

}  // namespace

int main(int argc, char** argv) {
  auto options = harness::parse(argc, argv, "An update of FashionMNIST's network on a CUDA device");
  options.finish = [] { torch::cuda::synchronize(); };
  if (!harness::is_there("updates on a device")) return 0;
  Ours ours;
  LibTorchs libtorchs;
  WithAutocast with_autocast;
  WithAll with_all;
  WithoutStep without_step;
  auto bound = contestant("bound: forward and backward alone", without_step);
  bound.bound = true;
  harness::contest("An update on a device, FashionMNIST's network, batch 64, float32",
                   {contestant("GradAccumulator, ga::optim::AdamW", ours, /*compared=*/true),
                    contestant("torch::optim::AdamW", libtorchs, /*compared=*/true), bound},
                   1, "updates", options);
  harness::contest(
      "An update on a device, FashionMNIST's network, batch 64, float16: at most 1.5 x autocast alone is asked",
      {contestant("autocast", with_autocast), contestant("autocast, clip_grad_norm_, AmpScaler.on_device", with_all)},
      1, "updates", options);
  harness::print_card();
}
