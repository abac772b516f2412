// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace gradaccum::detail {

/// The power of two that a backward pass starts with, as far as it is known beforehand: a loss scale or a weight that
/// the last pass had is what the next will have.
struct SeedExponent {
  int value = 0;

  /// Becomes that of a number: of 60 it is 5, as of 32. What has none changes nothing.
  void follow(double seed);
};

/// Gradients that were computed with the loss, and what it takes to compute them again.
struct ComputedGradients {
  std::vector<at::Tensor> gradients;  ///< of these parameters, in their order
  int exponent = 0;                   ///< of the seed that they were computed with
  /// With another one; empty where multiplying by a power of two is as good, as nothing underflows before.
  std::function<std::vector<at::Tensor>(int exponent)> again = {};
};

/// Makes a loss whose backward hands these gradients to the parameters; or what is returned does, without autograd.
std::shared_ptr<ReadyGradients> set_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters,
                                              ComputedGradients computed, std::shared_ptr<SeedExponent> next);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_backward.ipp>
#endif
