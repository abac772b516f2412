// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw8bit.hpp>

#include "support/leaves.hpp"
#include "support/waves.hpp"

#include "pytorch_values/adam8bit.hpp"

// The steps of adam8bit.py, compared with an Adam with bitsandbytes' quantization.

namespace ga = gradaccum;
using namespace testing;

namespace {

struct Difference {
  double parameters = 0;  // the largest difference
  int codes = 0;          // the number of different codes
};

template <class Optimizer, class Options>
Difference difference(const pytorch_values::Adam8bitBaseline& baseline) {
  const std::int64_t size = pytorch_values::adam8bit_size, every = pytorch_values::adam8bit_every;
  const auto parameter = leaf(waves({size}, 0).to(at::kFloat));
  Optimizer optimizer({parameter},
                      Options(baseline.lr).weight_decay(baseline.weight_decay).betas({0.9, 0.99}).eps(1e-8));
  for (int step = 1; step <= pytorch_values::adam8bit_steps; ++step) {
    const auto gradient = waves({size}, 1000 * step).to(at::kFloat);
    parameter.mutable_grad() = 0.01 * (gradient + gradient.sign());
    optimizer.step();
  }
  const auto sample = [&](const at::Tensor& all) { return all.detach().slice(0, 0, size, every); };
  auto& state = static_cast<ga::optim::Adam8bitParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
  const auto others = [&](const at::Tensor& codes, const std::vector<int>& expected) {
    return sample(codes).to(at::kInt).ne(torch::tensor(expected, at::kInt)).sum().template item<int>();
  };
  return {(sample(parameter).to(at::kDouble) - torch::tensor(baseline.parameters, at::kDouble))
              .abs()
              .max()
              .template item<double>(),
          others(state.exp_avg, baseline.exp_avg) + others(state.exp_avg_sq, baseline.exp_avg_sq)};
}
using Coupled = ga::optim::Adam8bitOptions;
using Decoupled = ga::optim::AdamW8bitOptions;

}  // namespace

TEST_CASE("bitsandbytes' values: the optimizers with moments of 8 bits") {
  const auto& all = pytorch_values::adam8bit;
  const auto adam = difference<ga::optim::Adam8bit, Coupled>(all.at("Adam8bit"));
  const auto adamw = difference<ga::optim::AdamW8bit, Decoupled>(all.at("AdamW8bit"));
  CHECK(adam.parameters < 2e-4);  // after 20 steps of 1e-2; a number between two codes may be rounded either way
  CHECK(adamw.parameters < 2e-4);
  CHECK(adam.codes <= 5);  // of 90
  CHECK(adamw.codes <= 5);
  // Control: the two optimizers differ.
  CHECK(difference<ga::optim::AdamW8bit, Decoupled>(all.at("Adam8bit")).parameters > 1e-2);
}
