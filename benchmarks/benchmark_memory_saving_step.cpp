// SPDX-License-Identifier: Apache-2.0
//
// A step of the memory-saving optimizers, compared to LibTorch's AdamW and to our one-pass AdamW in float32, whose
// speed they should reach.

#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>

#include "harness.hpp"
#include "parameter_sets.hpp"

namespace ga = gradaccum;
using namespace parameter_sets;

namespace {

void compare(const ParameterSet& set, const harness::Options& options) {
  torch::NoGradGuard no_grad;
  ga::optim::AdamW adamw(make_parameters(set), ga::optim::AdamWOptions(1e-3));
  ga::optim::AdamW8bit adamw8bit(make_parameters(set), ga::optim::AdamW8bitOptions(1e-3));
  ga::optim::Adafactor adafactor(make_parameters(set), ga::optim::AdafactorOptions(1e-2));
  torch::optim::AdamW torch_adamw(make_parameters(set), torch::optim::AdamWOptions(1e-3));
  harness::contest("A step that saves memory, " + set.description(),
                   {{"ga::optim::AdamW, 16 bytes a parameter", [&] { adamw.step(); }},
                    {"ga::optim::AdamW8bit, 10 bytes", [&] { adamw8bit.step(); }},
                    {"ga::optim::Adafactor, 8 bytes (of vectors 12)", [&] { adafactor.step(); }},
                    {"torch::optim::AdamW, 16 bytes", [&] { torch_adamw.step(); }}},
                   set.elements() / 1e6, "M parameters", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "A step of the optimizers that save memory, against AdamW's");
  for (auto& set : all()) compare(set, options);
}
