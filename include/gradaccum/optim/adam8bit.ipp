// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/optim/adam8bit.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <utility>

namespace gradaccum::optim {

GRADACCUM_INLINE Adam8bit::Adam8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                    Adam8bitOptions defaults)
    : Adam8bitOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE Adam8bit::Adam8bit(std::vector<at::Tensor> parameters, Adam8bitOptions defaults)
    : Adam8bitOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void Adam8bit::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  move_blocks(gradient_of, multiplier, /*decoupled=*/false);
}

}  // namespace gradaccum::optim
