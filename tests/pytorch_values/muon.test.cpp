// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/optim/muon.hpp>

#include "support/waves.hpp"

#include "pytorch_values/muon.hpp"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

// The training of muon.py, compared with the results of Python's torch.optim.Muon.

namespace ga = gradaccum;
using testing::waves;

namespace {

/// Returns the largest relative difference to the expected samples.
double error_of(const pytorch_values::MuonTraining& training, const pytorch_values::MuonTraining& expected) {
  torch::nn::Sequential model(torch::nn::Linear(6, 10), torch::nn::Tanh(), torch::nn::Linear(10, 10), torch::nn::Tanh(),
                              torch::nn::Linear(10, 4));
  model->to(at::kDouble);
  testing::fill_with_waves(model);
  std::vector<at::Tensor> matrices;
  for (auto& p : model->parameters())
    if (p.dim() == 2) matrices.push_back(p);
  const auto dtype = training.in_bfloat16 ? at::kBFloat16 : at::kDouble;
  ga::optim::Muon muon({matrices[0], matrices[1]}, ga::optim::MuonOptions(training.first).ns_dtype(dtype));
  muon.add_param_group({{matrices[2]}});
  muon.param_groups()[1].set_options(  // replaced, not merged with the others
      std::make_unique<ga::optim::MuonOptions>(ga::optim::MuonOptions(training.last).ns_dtype(dtype)));
  const auto x = waves({20, 6}, 100), y = waves({20, 4}, 300).square();
  double largest = 0;
  for (int step = 0; step < pytorch_values::muon_steps; ++step) {
    muon.zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    muon.step();
    if (step % pytorch_values::muon_sampled_every != 0) continue;
    const auto& sample = expected.samples.at(step / pytorch_values::muon_sampled_every);
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const auto found = matrices[i].detach().square().sum().item<double>();
      largest = std::max(largest, std::abs(found - sample[i]) / sample[i]);
    }
  }
  return largest;
}

}  // namespace

TEST_CASE("PyTorch's values: Muon, 61 steps with two groups, in float64 and in bfloat16") {
  for (auto& [name, training] : pytorch_values::muon_trainings) {
    INFO(name);
    CHECK(error_of(training, training) < (training.in_bfloat16 ? 5e-3 : 1e-9));
  }
}

TEST_CASE("PyTorch's values: Muon's settings give different values") {
  const auto& all = pytorch_values::muon_trainings;
  for (auto& [name, training] : all) {
    INFO(name);
    if (name != "defaults" && name != "bfloat16") CHECK(error_of(training, all.at("defaults")) > 1e-2);
  }
  CHECK(error_of(all.at("bfloat16"), all.at("defaults")) > 1e-6);
}
