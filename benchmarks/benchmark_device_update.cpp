// SPDX-License-Identifier: Apache-2.0
//
// An update of FashionMNIST's network on a CUDA device, by one batch of 64 on the device: LibTorch's loop, ours, ours
// with a graphed step, and these in float16 with clipping and a loss scale on the device. The host runs ahead of the
// device, as in a training.

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/graphed_step.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

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
  at::Tensor loss() { return objective(network, batch()).mean; }
  at::Tensor loss_in_float16() { return objective_in_float16(network, batch()).mean; }
  torch::data::Example<> batch() const { return {images, labels}; }

  static ga::Loss objective(fashion_mnist::Network& network, const torch::data::Example<>& batch) {
    return torch::cross_entropy_loss(network->forward(batch.data), batch.target);
  }
  static ga::Loss objective_in_float16(fashion_mnist::Network& network, const torch::data::Example<>& batch) {
    const ga::Autocast autocast(device, torch::kHalf);
    return objective(network, batch);
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

struct Graphed : Ours {
  void update() {
    step(batch()).backward();
    end_update();
  }

  ga::GraphedStep<fashion_mnist::Network, decltype(&objective)> step{network, &objective};
};

struct Compiled : Ours {
  explicit Compiled(const std::filesystem::path& folder) : step(network, &objective, folder) {}
  void update() {
    step(batch()).backward();
    end_update();
  }

  ga::CompiledStep<fashion_mnist::Network, decltype(&objective)> step;
};

struct WithAutocast : Ours {
  void update() {
    loss_in_float16().backward();
    end_update();
  }
};

struct WithAll : Ours {
  void update() { update_by(loss_in_float16()); }
  void update_by(const ga::Loss& loss) {
    scaler.scale(loss).backward();
    window.clip_grad_norm_(1.0);
    scaler.step(window);
    scaler.update();
    window.zero_grad();
  }

  ga::AmpScaler scaler{{.on_device = true}};
};

struct GraphedWithAll : WithAll {
  void update() { update_by(step(batch())); }

  ga::GraphedStep<fashion_mnist::Network, decltype(&objective_in_float16)> step{network, &objective_in_float16};
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
  std::filesystem::path steps, record_in;
  auto options = harness::parse(argc, argv, "An update of FashionMNIST's network on a CUDA device", [&](CLI::App& app) {
    app.add_option("--record", record_in, "record the step in this folder, for gradaccum-compile-step, and end");
    app.add_option("--steps", steps, "update by the step that was recorded and compiled in this folder, too");
  });
  options.finish = [] { torch::cuda::synchronize(); };
  if (!harness::is_there("updates on a device")) return 0;
  Ours ours;
  if (!record_in.empty()) {
    fmt::print("{}", fmt::streamed(ga::save_step(ours.network, &Program::objective, ours.batch(), record_in)));
    return 0;
  }
  LibTorchs libtorchs;
  WithAutocast with_autocast;
  WithAll with_all;
  Graphed graphed;
  GraphedWithAll graphed_with_all;
  WithoutStep without_step;
  auto bound = contestant("bound: forward and backward alone", without_step);
  bound.bound = true;
  std::vector<harness::Contestant> contestants = {
      contestant("GradAccumulator, ga::optim::AdamW", ours, /*compared=*/true),
      contestant("GraphedStep, GradAccumulator, ga::optim::AdamW", graphed, /*compared=*/true),
      contestant("torch::optim::AdamW", libtorchs, /*compared=*/true), bound};
  std::optional<Compiled> compiled;
  if (!steps.empty())
    contestants.insert(contestants.begin() + 2, contestant("CompiledStep, GradAccumulator, ga::optim::AdamW",
                                                           compiled.emplace(steps), /*compared=*/true));
  harness::contest("An update on a device, FashionMNIST's network, batch 64, float32", contestants, 1, "updates",
                   options);
  harness::contest(
      "An update on a device, FashionMNIST's network, batch 64, float16: at most 1.5 x autocast alone is asked",
      {contestant("autocast", with_autocast), contestant("autocast, clip_grad_norm_, AmpScaler.on_device", with_all),
       contestant("GraphedStep, autocast, clip_grad_norm_, AmpScaler.on_device", graphed_with_all)},
      1, "updates", options);
  harness::print_card();
}
