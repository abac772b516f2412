// SPDX-License-Identifier: Apache-2.0
//
// The Trainer's overhead: an epoch of micro-batches by `fit`, compared to the same loop by hand, with a GradAccumulator
// and without. Bound: forward and backward alone.

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/trainer.hpp>

#include "harness.hpp"
#include "networks.hpp"

namespace ga = gradaccum;

namespace {

constexpr int steps = 4;
constexpr int windows = 64;

void compare(const std::string& name, const std::vector<std::int64_t>& widths, std::int64_t rows,
             const harness::Options& options) {
  auto ours = harness::make_network(widths), measured = harness::make_network(widths),
       peer = harness::make_network(widths), by_hand = harness::make_network(widths),
       bound = harness::make_network(widths);
  const torch::optim::AdamWOptions hyper(1e-4);
  ga::optim::AdamW our_adamw(ours->parameters(), hyper), measured_adamw(measured->parameters(), hyper),
      peer_adamw(peer->parameters(), hyper), by_hand_adamw(by_hand->parameters(), hyper);
  const ga::data::Batch batch{torch::rand({rows, widths.front()}), torch::randint(widths.back(), {rows})};
  const std::vector<ga::data::Batch> epoch(steps * windows, batch);
  const auto loss_of = [](auto& model, auto& batch) {
    return torch::cross_entropy_loss(model->forward(batch.data), batch.target);
  };

  ga::Trainer trainer(ours, our_adamw, loss_of, ga::Accumulate{.steps = steps}, ga::ClipNorm{.max = 1.0});
  ga::Trainer measuring(measured, measured_adamw, loss_of, ga::Accumulate{.steps = steps}, ga::ClipNorm{.max = 1.0});
  ga::GradAccumulator accumulator(peer_adamw, {.steps = steps});
  const auto with_accumulator = [&] {
    for (auto& batch : epoch) {
      loss_of(peer, batch).backward();
      accumulator.clip_grad_norm_(1.0);
      accumulator.step();
      accumulator.zero_grad();
    }
  };
  const auto alone = [&] {
    for (std::size_t i = 0; i < epoch.size(); ++i) {
      (loss_of(by_hand, epoch[i]) / steps).backward();
      if ((i + 1) % steps != 0) continue;
      torch::nn::utils::clip_grad_norm_(by_hand->parameters(), 1.0);
      by_hand_adamw.step();
      by_hand_adamw.zero_grad();
    }
  };
  const auto forward_and_backward = [&] {
    for (auto& batch : epoch) loss_of(bound, batch).backward();
    bound->zero_grad();
  };
  harness::contest(
      fmt::format("An epoch of {} micro-batches, {} an update, clipped, AdamW, {}", epoch.size(), steps, name),
      {{"Trainer", [&] { trainer.fit(epoch); }, ours->parameters()},
       {"the loop by hand, GradAccumulator", with_accumulator, peer->parameters()},
       {"the loop by hand, nothing of ours but AdamW", alone, by_hand->parameters()},
       {"Trainer, {.measure_memory = true}", [&] { measuring.fit(epoch, {.measure_memory = true}); },
        measured->parameters()},
       {.name = "bound: forward and backward alone", .run = forward_and_backward, .bound = true}},
      static_cast<double>(epoch.size()), "micro-batches", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "What the Trainer costs, against the same loop by hand");
  compare("a tiny network (8-8-8-10, batch 1)", {8, 8, 8, 10}, 1, options);
  compare("the FashionMNIST network (784-512-512-10, batch 64)", {784, 512, 512, 10}, 64, options);
}
