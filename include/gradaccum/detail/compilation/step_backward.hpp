// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace gradaccum::detail {

/// The exponent of the seed (a loss scale or a weight) that the next backward pass is expected to have: the last one's.
struct SeedExponent {
  int value = 0;

  /// Sets the exponent to that of `seed`: 5 for 32, and for 60. Ignores 0 and numbers that are not finite.
  void follow(double seed);
};

/// Gradients computed with the loss, and a function that recomputes them.
struct ComputedGradients {
  std::vector<at::Tensor> gradients;  ///< in the order of the parameters
  int exponent = 0;                   ///< exponent of the seed they were computed with
  /// Recomputes them with another exponent. Empty if nothing underflows: a factor of a power of two is then as good.
  std::function<std::vector<at::Tensor>(int exponent)> again = {};
};

/// Makes the backward of `loss` add these gradients to the parameters. The returned object does it without autograd.
std::shared_ptr<ReadyGradients> set_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters,
                                              ComputedGradients computed, std::shared_ptr<SeedExponent> next);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_backward.ipp>
#endif
