// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/optimizer_of_shards.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/shards.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>

#include <cstddef>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE OptimizerOfShards::OptimizerOfShards(AnyOptimizer& optimizer, Shards& shards,
                                                      std::shared_ptr<WindowGradients> window)
    : optimizer_(optimizer), shards_(shards), window_(std::move(window)) {}

GRADACCUM_INLINE void OptimizerOfShards::step(const Gradients& gradients) {
  shards_.check(*optimizer_.torch_optimizer());
  if (optimizer_.judges_on_device(gradients)) window_->judge_on_device();
  struct NoGradients {  // pieces are views of gradients that others may clear
    Shards& shards;
    ~NoGradients() {
      for (std::size_t place = 0; place < shards.size(); ++place)
        if (shards.is_cut(place)) shards.own(place).mutable_grad().reset();
    }
  } none_at_end{shards_};
  const Gradients own(window_->of_shards(shards_));
  if (own.raw().empty()) return;  // all of them are other ranks'
  shards_.with_own(*optimizer_.torch_optimizer(), [&] { optimizer_.step(own); });
}

}  // namespace gradaccum::detail
