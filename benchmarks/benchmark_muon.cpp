// SPDX-License-Identifier: Apache-2.0
//
// An update of a small transformer whose matrices Muon steps and whose other parameters AdamW: against the operations
// of Python's torch.optim.Muon. Bound: forward and backward alone. With --learn what Muon is worth instead: the loss of
// a language model after as many updates, and after as long, as with AdamW.

#include <gradaccum/mkl_on_amd.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/multi_optimizer.hpp>
#include <gradaccum/optim/muon.hpp>

#include "harness.hpp"
#include "language_model.hpp"

namespace ga = gradaccum;

namespace {

struct Split {
  explicit Split(const std::vector<at::Tensor>& parameters) {
    for (auto& p : parameters) (p.dim() == 2 ? matrices : others).push_back(p);
  }
  std::vector<at::Tensor> matrices, others;
};

/// Python's step, an operation of LibTorch's for each of Python's.
class PythonsMuon {
 public:
  PythonsMuon(std::vector<at::Tensor> matrices, double lr) : matrices_(std::move(matrices)), lr_(lr) {
    for (auto& p : matrices_) buffers_.push_back(torch::zeros_like(p));
  }

  void step() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      auto& p = matrices_[i];
      buffers_[i].lerp_(p.grad(), 1 - 0.95);
      auto x = p.grad().lerp(buffers_[i], 0.95).to(torch::kBFloat16);
      const bool tall = x.size(0) > x.size(1);
      if (tall) x = x.t();
      x.div_(x.norm().clamp_min(1e-7));
      for (int k = 0; k < 5; ++k) {
        const auto gram = x.mm(x.t());
        x = at::addmm(x, at::addmm(gram, gram, gram, -4.7750, 2.0315), x, 3.4445);
      }
      if (tall) x = x.t();
      p.mul_(1 - lr_ * 0.1);
      p.add_(x, -lr_ * std::sqrt(std::max(1.0, static_cast<double>(p.size(0)) / static_cast<double>(p.size(1)))));
    }
  }

 private:
  std::vector<at::Tensor> matrices_, buffers_;
  double lr_;
};

void compare_updates(const harness::Options& options) {
  const auto make = [] {
    torch::manual_seed(0);
    torch::nn::Sequential blocks;
    for (int i = 0; i < 4; ++i) blocks->push_back(harness::TransformerBlock(256, 4));
    return blocks;
  };
  auto ours = make(), peer = make(), bound = make();
  const auto x = torch::randn({8, 64, 256}), y = torch::randn({8, 64, 256});
  const Split our_parts(ours->parameters()), peer_parts(peer->parameters());
  ga::optim::Muon muon(our_parts.matrices, ga::optim::MuonOptions(0.02));
  PythonsMuon pythons(peer_parts.matrices, 0.02);
  ga::optim::AdamW our_adamw(our_parts.others), peer_adamw(peer_parts.others);
  ga::optim::MultiOptimizer both(muon, our_adamw);
  const auto update = [&](auto& model, auto&... optimizers) {
    model->zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    (optimizers.step(), ...);
  };
  const auto forward_and_backward = [&] {
    bound->zero_grad();
    torch::mse_loss(bound->forward(x), y).backward();
  };
  harness::contest("An update of 4 transformer blocks of width 256, 8 x 64 tokens, Muon and AdamW",
                   {{"ga::optim::Muon", [&] { update(ours, muon, our_adamw); }},
                    {"both as a ga::optim::MultiOptimizer", [&] { update(ours, both); }},
                    {"the operations of Python's Muon", [&] { update(peer, pythons, peer_adamw); }},
                    {.name = "bound: forward and backward alone", .run = forward_and_backward, .bound = true}},
                   1, "updates", options);
}

struct Learned {
  std::vector<double> losses, seconds;  // at each evaluation
};

/// Trains a language model, and evaluates it every 50 updates on text that it has not seen.
Learned learn(bool by_muon, std::uint64_t seed, int updates) {
  const harness::ModelShape shape{"", 128, 4, 4, 1024};
  const harness::MarkovChain chain(shape.vocabulary);
  torch::manual_seed(seed);
  harness::LanguageModel model(shape, 64);
  std::vector<at::Tensor> matrices, others;
  for (auto& [name, p] : model->named_parameters().pairs())
    (by_muon && p.dim() == 2 && name.starts_with("blocks") ? matrices : others).push_back(p);
  ga::optim::Muon muon(matrices, ga::optim::MuonOptions(3e-3).adjust_lr_fn(ga::optim::MuonAdjustLr::match_rms_adamw));
  ga::optim::AdamW adamw(others, ga::optim::AdamWOptions(3e-3).weight_decay(0.1));
  ga::optim::MultiOptimizer both(muon, adamw);
  Learned learned;
  double trained = 0;
  for (int i = 1; i <= updates; ++i) {
    trained += harness::seconds([&] {
      model->zero_grad();
      model->loss(chain.batch(1000 * seed + static_cast<std::uint64_t>(i), 16, 64)).backward();
      both.step();
    });
    if (i % 50 != 0) continue;
    const at::NoGradGuard no_grad;
    learned.losses.push_back(model->loss(chain.batch(999'999, 64, 64)).item<double>());
    learned.seconds.push_back(trained);
  }
  return learned;
}

void show_worth(int updates) {
  fmt::print(
      "A language model of 4 blocks of width 128, {} updates of 16 x 64 tokens; loss on other text, best possible "
      "{:.4f}\n",
      updates, harness::MarkovChain::entropy());
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    const auto adamw = learn(false, seed, updates), muon = learn(true, seed, updates);
    const auto last = muon.losses.size() - 1;
    std::size_t as_long = 0;  // the last evaluation of Muon within AdamW's time
    while (as_long < last && muon.seconds[as_long + 1] <= adamw.seconds[last]) ++as_long;
    fmt::print("  seed {}: AdamW {:.4f} in {:.0f} s; Muon and AdamW {:.4f} in {:.0f} s, {:.4f} after AdamW's time\n",
               seed, adamw.losses[last], adamw.seconds[last], muon.losses[last], muon.seconds[last],
               muon.losses[as_long]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int updates = 0;
  const auto options =
      harness::parse(argc, argv, "An update with Muon against Python's operations", [&](CLI::App& app) {
        app.add_option("--learn", updates, "updates of a training that shows what Muon is worth")
            ->check(CLI::Range(50, 100000));
      });
  if (updates > 0)
    show_worth(updates);
  else
    compare_updates(options);
}
