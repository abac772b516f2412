// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/optim/adafactor.hpp>

#include "support/waves.hpp"

#include "pytorch_values/adafactor.hpp"

// The steps of adafactor.py, compared with Adafactor of Python's PyTorch and of transformers.

namespace ga = gradaccum;
using pytorch_values::AdafactorBaseline;
using testing::waves;

namespace {

/// Returns the largest relative difference to the baseline's samples.
double error_of(const AdafactorBaseline& baseline, const AdafactorBaseline& expected) {
  std::vector<at::Tensor> parameters;
  for (auto& shape : pytorch_values::adafactor_shapes)
    parameters.push_back(waves(shape, 10 * static_cast<std::int64_t>(parameters.size())).set_requires_grad(true));
  std::vector<torch::optim::OptimizerParamGroup> groups;  // each with all options, as in Python
  groups.emplace_back(std::vector<at::Tensor>{parameters[0]},
                      std::make_unique<ga::optim::AdafactorOptions>(baseline.matrix));
  groups.emplace_back(std::vector<at::Tensor>(parameters.begin() + 1, parameters.end()),
                      std::make_unique<ga::optim::AdafactorOptions>(baseline.others));
  ga::optim::Adafactor optimizer(groups);
  double largest = 0;
  for (int step = 0; step < pytorch_values::adafactor_steps; ++step) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      parameters[i].mutable_grad() =
          waves(parameters[i].sizes(), 100 * step + static_cast<std::int64_t>(i)).pow(3) * (step % 7 + 0.1);
    optimizer.step();
    if ((step + 1) % pytorch_values::adafactor_sampled_every != 0) continue;
    const auto& sample = expected.samples.at(step / pytorch_values::adafactor_sampled_every);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto found = parameters[i].detach().square().sum().item<double>();
      largest = std::max(largest, std::abs(found - sample.at(i)) / sample.at(i));
    }
  }
  return largest;
}

}  // namespace

TEST_CASE("PyTorch's values: Adafactor, 60 steps of tensors of 1 to 4 dimensions with two groups") {
  for (auto& [name, baseline] : pytorch_values::adafactors) {
    INFO(name);
    CHECK(error_of(baseline, baseline) < 1e-10);
  }
}

TEST_CASE("PyTorch's values: Adafactor's settings give different values") {
  const auto& all = pytorch_values::adafactors;
  for (auto& [a, baseline] : all)
    for (auto& [b, expected] : all) {
      INFO(a << " against " << b);
      // With gradients of this size a tiny eps1 has no effect.
      const bool same = (a == "pytorch" && b == "transformers") || (a == "transformers" && b == "pytorch");
      if (a != b && !same) CHECK(error_of(baseline, expected) > 1e-4);
    }
}
