// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/optim/adamw8bit.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <utility>

namespace gradaccum::optim {

GRADACCUM_INLINE AdamW8bit::AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                      AdamW8bitOptions defaults)
    : Adam8bitOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE AdamW8bit::AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions defaults)
    : Adam8bitOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void AdamW8bit::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  move_blocks(gradient_of, multiplier, /*decoupled=*/true);
}

}  // namespace gradaccum::optim
