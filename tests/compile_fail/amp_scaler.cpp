// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>

#include <torch/optim/lbfgs.h>

#include <utility>

namespace ga = gradaccum;

struct NoOptimizer {};

int main() {
  torch::optim::LBFGS lbfgs({at::Tensor()});
  NoOptimizer none;
  static_cast<void>(none);
  ga::AmpScaler scaler({.init_scale = 8});
  ga::Autocast autocast(at::kCPU);
  scaler.step(lbfgs);                            // error: LBFGS calls its closure several times a step
  scaler.unscale_(none);                         // error: an optimizer has step\(\), zero_grad\(\) and param_groups\(\)
  ga::AmpScaler copy(scaler);                    // error: deleted
  ga::AmpScaler typo({.initial_scale = 8});      // error: initial_scale
  ga::Autocast moved(std::move(autocast));       // error: deleted
  ga::Autocast implicit = at::Device(at::kCPU);  // error: Autocast
}
