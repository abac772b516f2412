// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace testing {

/// Sines of their index: the same numbers as in the scripts of pytorch_values, without a file or a generator.
inline at::Tensor waves(at::IntArrayRef shape, std::int64_t start) {
  return torch::arange(start, start + c10::multiply_integers(shape), at::kDouble).sin().reshape(shape);
}

/// Fills all parameters with consecutive parts of one wave.
template <class Model>
void fill_with_waves(const Model& model, double amplitude = 1) {
  at::NoGradGuard no_grad;
  std::int64_t start = 0;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(amplitude * waves(parameter.sizes(), start));
    start += parameter.numel();
  }
}

}  // namespace testing
