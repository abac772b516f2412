// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/lion.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/waves.hpp"

#include "pytorch_values/optimizers.hpp"

// The training of optimizers.py with the one-pass optimizers, compared with the results of Python's PyTorch.

namespace ga = gradaccum;
using testing::waves;

namespace {

torch::nn::Sequential make_network() {
  torch::nn::Sequential model(torch::nn::Linear(2, 3), torch::nn::Sigmoid(), torch::nn::Linear(3, 1),
                              torch::nn::Sigmoid());
  model->to(at::kDouble);
  testing::fill_with_waves(model);
  return model;
}

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const pytorch_values::Baseline& baseline, torch::nn::Sequential& model) {
  std::vector<at::Tensor> weights, biases;
  for (auto& parameter : model->parameters()) (parameter.dim() == 2 ? weights : biases).push_back(parameter);
  auto optimizer = std::make_unique<Optimizer>(weights, static_cast<const Options&>(*baseline.weights));
  optimizer->add_param_group({biases});
  optimizer->param_groups()[1].set_options(baseline.biases->clone());  // replaced, not merged with the others
  return optimizer;
}

std::unique_ptr<torch::optim::Optimizer> make(const std::string& name, const pytorch_values::Baseline& baseline,
                                              torch::nn::Sequential& model) {
  if (name.starts_with("SGD")) return make<ga::optim::SGD, ga::optim::SGDOptions>(baseline, model);
  if (name.starts_with("AdamW")) return make<ga::optim::AdamW, ga::optim::AdamWOptions>(baseline, model);
  if (name.starts_with("Lion")) return make<ga::optim::Lion, ga::optim::LionOptions>(baseline, model);
  return make<ga::optim::Adam, ga::optim::AdamOptions>(baseline, model);
}

/// Returns the largest relative difference to the baseline's samples.
double error_of(const std::string& name, const pytorch_values::Baseline& baseline,
                const pytorch_values::Baseline& expected) {
  auto model = make_network();
  auto optimizer = make(name, baseline, model);
  const auto x = waves({20, 2}, 100), y = waves({20, 1}, 300).square();
  double largest = 0;
  for (int step = 0; step < pytorch_values::optimizer_steps; ++step) {
    optimizer->zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    optimizer->step();
    if (step % pytorch_values::sampled_every != 0) continue;
    const auto& sample = expected.samples.at(step / pytorch_values::sampled_every);
    const auto parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto found = parameters[i].detach().square().sum().item<double>();
      largest = std::max(largest, std::abs(found - sample[i]) / sample[i]);
    }
  }
  return largest;
}

}  // namespace

TEST_CASE("PyTorch's values: the one-pass optimizers, 1001 steps with two groups") {
  for (auto& [name, baseline] : pytorch_values::optimizers) {
    INFO(name);
    CHECK(error_of(name, baseline, baseline) < 1e-10);
  }
}

TEST_CASE("PyTorch's values: the settings give different values") {
  const auto& all = pytorch_values::optimizers;
  CHECK(error_of("AdamW", all.at("AdamW_weight_decay"), all.at("AdamW")) > 1e-3);
  CHECK(error_of("Lion", all.at("Lion_weight_decay"), all.at("Lion")) > 1e-3);
  CHECK(error_of("SGD", all.at("SGD_dampening"), all.at("SGD_momentum")) > 1e-3);
}
