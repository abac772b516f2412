// SPDX-License-Identifier: Apache-2.0
//
// A step of AdamW, compared to LibTorch's and to ATen's fused operation. Bound: the simplest operations that move the
// 28 bytes per parameter that a step reads and writes.

#include <gradaccum/optim/adamw.hpp>

#include "harness.hpp"
#include "parameter_sets.hpp"

namespace ga = gradaccum;
using namespace parameter_sets;

namespace {

void compare(const ParameterSet& set, const harness::Options& options) {
  torch::NoGradGuard no_grad;  // saves ATen some bookkeeping
  const torch::optim::AdamWOptions hyper(1e-3);
  const auto our_parameters = make_parameters(set), torch_parameters = make_parameters(set);
  ga::optim::AdamW ours(our_parameters, hyper);
  torch::optim::AdamW torch_adamw(torch_parameters, hyper);
  AtenFusedAdamW fused(make_parameters(set), hyper);
  const Stream stream(set);

  harness::contest("AdamW step, " + set.description(),
                   {{"ga::optim::AdamW", [&] { ours.step(); }, our_parameters},
                    {"torch::optim::AdamW", [&] { torch_adamw.step(); }, torch_parameters},
                    {"at::_foreach_add_, at::_fused_adamw_", [&] { fused.step(); }, fused.parameters},
                    {.name = "bound: 28 bytes a parameter", .run = [&] { stream.run(); }, .bound = true}},
                   28 * set.elements() / 1e9, "GB", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "A step of AdamW against torch::optim::AdamW and at::_fused_adamw_");
  for (auto& set : all()) compare(set, options);
}
