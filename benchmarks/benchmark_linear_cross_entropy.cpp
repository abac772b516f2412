// SPDX-License-Identifier: Apache-2.0
//
// The last layer and the loss of a language model, forward and backward of a window's first and second micro-batch:
// ga::linear_cross_entropy, which makes some logits at a time, against all logits. Time, and the peak of memory without
// hidden states, weights and, in the second, their gradients. Bound: the layer's three products alone. With --on-device
// on a GPU, whose weights are float32 under autocast in bfloat16. python/linear_cross_entropy.py has Python's.

#include <gradaccum/gradaccum.hpp>

#include "card.hpp"
#include "harness.hpp"

namespace ga = gradaccum;

namespace {

constexpr std::int64_t width = 256;
at::Device device = at::kCPU;

struct Head {
  at::Tensor hidden, weight, target;

  Head(std::int64_t tokens, std::int64_t vocabulary) {
    torch::manual_seed(0);
    hidden = torch::randn({tokens, width}, device).requires_grad_();
    weight = (torch::randn({vocabulary, width}, device) * 0.05).requires_grad_();
    target = torch::randint(vocabulary, {tokens}, torch::dtype(torch::kLong).device(device));
    for (auto& leaf : {hidden, weight}) leaf.mutable_grad() = torch::zeros_like(leaf);
  }
};

using LossOf = std::function<ga::Loss(const Head&)>;

ga::Loss in_parts(const Head& head) {
  const auto items = static_cast<double>(head.target.numel());
  return ga::linear_cross_entropy(head.hidden, head.weight, head.target, {.items = items});
}

ga::Loss by_all_logits(const Head& head) {
  return torch::cross_entropy_loss(torch::linear(head.hidden, head.weight), head.target);
}

/// Forward in bfloat16 on a device, and backward.
void run(const Head& head, const LossOf& loss_of, bool is_first) {
  if (is_first) head.weight.mutable_grad() = at::Tensor();
  const auto loss = [&] {
    const ga::Autocast autocast(device, torch::kBFloat16, device.is_cuda());
    return loss_of(head);
  }();
  loss.backward();
}

std::string with_peak(const std::string& name, const Head& head, const LossOf& loss_of, bool is_first) {
  run(head, loss_of, is_first);
  if (is_first) head.weight.mutable_grad() = at::Tensor();
  ga::MemoryMeter meter;
  run(head, loss_of, is_first);
  return fmt::format("{}, {:.0f} MiB", name, static_cast<double>(meter.peak_bytes(device)) / (1 << 20));
}

void compare(std::int64_t tokens, std::int64_t vocabulary, const harness::Options& options) {
  const Head ours(tokens, vocabulary), theirs(tokens, vocabulary);
  at::Tensor logits, to_hidden = torch::empty_like(ours.hidden), to_weight = torch::empty_like(ours.weight);
  if (device.is_cpu()) logits = torch::empty({tokens, vocabulary}, ours.weight.options());
  const auto products = [&] {
    const at::NoGradGuard no_grad;
    at::mm_out(logits, ours.hidden, ours.weight.t());
    at::mm_out(to_hidden, logits, ours.weight);
    at::mm_out(to_weight, logits.t(), ours.hidden);
  };
  for (const bool is_first : {true, false}) {
    const auto our_name = with_peak("ga::linear_cross_entropy", ours, in_parts, is_first);
    const auto their_name = with_peak("all logits", theirs, by_all_logits, is_first);
    const auto distance = (ours.weight.grad() - theirs.weight.grad()).norm() / theirs.weight.grad().norm();
    TORCH_CHECK(distance.item<double>() < (device.is_cuda() ? 0.01 : 1e-5),
                "the gradients must be equal, and differ by ", distance.item<double>());
    std::vector<harness::Contestant> all{{.name = our_name, .run = [&] { run(ours, in_parts, is_first); }},
                                         {.name = their_name, .run = [&] { run(theirs, by_all_logits, is_first); }}};
    if (device.is_cpu()) all.push_back({.name = "bound: three products", .run = products, .bound = true});
    harness::contest(fmt::format("{} tokens, {} words, width {}, the {} micro-batch of a window", tokens, vocabulary,
                                 width, is_first ? "first" : "second"),
                     all, static_cast<double>(tokens), "tokens", options);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool on_device = false;
  std::vector<std::int64_t> words{50'257, 250'880};
  auto options = harness::parse(argc, argv, "The cross entropy of a linear layer in parts", [&](CLI::App& app) {
    app.add_flag("--on-device", on_device, "on a GPU, in bfloat16 by autocast");
    app.add_option("--words", words, "the sizes of the vocabularies");
  });
  if (on_device) {
    if (!harness::is_there("a language model's loss on a device")) return 0;
    device = harness::device;
    options.finish = [] { torch::cuda::synchronize(); };
  }
  for (const auto vocabulary : words)
    compare(vocabulary < 10'000 ? 64 : on_device ? 4096 : vocabulary < 100'000 ? 1024 : 512, vocabulary, options);
  if (on_device) harness::print_card();
}
