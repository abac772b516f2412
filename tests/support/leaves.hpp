// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <vector>

namespace testing {

using Parameters = std::vector<at::Tensor>;

/// Makes a parameter with these values in new memory.
inline at::Tensor leaf(const at::Tensor& values) { return values.detach().clone().set_requires_grad(true); }

inline Parameters leaves(const Parameters& values) {
  Parameters result;
  for (auto& value : values) result.push_back(leaf(value));
  return result;
}

}  // namespace testing
