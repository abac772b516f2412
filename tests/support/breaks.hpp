// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

namespace testing {

/// SGD whose step throws while `breaks` is set.
struct Breaks : torch::optim::SGD {
  using SGD::SGD;
  bool breaks = true;
  at::Tensor step(LossClosure closure = nullptr) override {
    TORCH_CHECK(!breaks, "step broke");
    return SGD::step(closure);
  }
};

}  // namespace testing
