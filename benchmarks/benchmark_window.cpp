// SPDX-License-Identifier: Apache-2.0
//
// A window of 8 micro-batches: the accumulator, compared to ordinary accumulation by hand (the loss divided by the
// number of micro-batches), with LibTorch's optimizer and with ours. Bound: the eight forward and backward passes.

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>

#include "harness.hpp"
#include "networks.hpp"

namespace ga = gradaccum;

namespace {

constexpr int steps = 8;

void compare(const std::string& name, const std::vector<std::int64_t>& widths, std::int64_t rows, bool clip,
             const harness::Options& options) {
  auto ours = harness::make_network(widths), peer = harness::make_network(widths),
       by_hand = harness::make_network(widths), bound = harness::make_network(widths);
  const torch::optim::AdamWOptions hyper(1e-3);
  ga::optim::AdamW our_adamw(ours->parameters(), hyper), by_hand_adamw(by_hand->parameters(), hyper);
  torch::optim::AdamW peer_adamw(peer->parameters(), hyper);
  ga::GradAccumulator accumulator(our_adamw, {.steps = steps});
  const auto x = torch::rand({rows, widths.front()}), y = torch::randint(widths.back(), {rows});
  const auto loss_of = [&](auto& model) { return torch::cross_entropy_loss(model->forward(x), y); };

  const auto our_window = [&] {
    for (int i = 0; i < steps; ++i) {
      loss_of(ours).backward();
      if (clip) accumulator.clip_grad_norm_(1.0);
      accumulator.step();
      accumulator.zero_grad();
    }
  };
  const auto window_by_hand = [&](auto& model, auto& optimizer) {
    for (int i = 0; i < steps; ++i) (loss_of(model) / steps).backward();
    if (clip) torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  };
  const auto forward_and_backward = [&] {
    for (int i = 0; i < steps; ++i) loss_of(bound).backward();
    bound->zero_grad();
  };
  harness::contest(
      fmt::format("A window of {} micro-batches, AdamW{}, {}", steps, clip ? " and clipping" : "", name),
      {{"GradAccumulator, ga::optim::AdamW", our_window, ours->parameters()},
       {"by hand, torch::optim::AdamW", [&] { window_by_hand(peer, peer_adamw); }, peer->parameters()},
       {"by hand, ga::optim::AdamW", [&] { window_by_hand(by_hand, by_hand_adamw); }, by_hand->parameters()},
       {.name = "bound: forward and backward alone", .run = forward_and_backward, .bound = true}},
      1, "windows", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "A window of 8 micro-batches against accumulation by hand");
  for (bool clip : {false, true}) {
    compare("784-512-512-10, 16 rows", {784, 512, 512, 10}, 16, clip, options);
    compare("8-8-8-10, 1 row", {8, 8, 8, 10}, 1, clip, options);
  }
}
