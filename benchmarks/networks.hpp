// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace harness {

/// Makes linear layers of these widths with ReLU between them, with the same parameters for each contestant.
inline torch::nn::Sequential make_network(const std::vector<std::int64_t>& widths) {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    if (i > 0) model->push_back(torch::nn::ReLU());
    model->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
  }
  return model;
}

}  // namespace harness
