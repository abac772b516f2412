// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/optimizer_of_shards.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/shards.hpp>
#include <gradaccum/gradients.hpp>

#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void OptimizerOfShards::step(const Gradients& gradients) {
  shards_.with_own(*optimizer_.torch_optimizer(), [&] { optimizer_.step(gradients); });
}

GRADACCUM_INLINE bool take_step_of_shards(AnyOptimizer& optimizer, Shards& shards, Gradients gradients) {
  TORCH_CHECK(optimizer.steps_by_elements() || !shards.any_is_cut(), "Shard: ", optimizer.name(),
              " was made to look at whole parameters after they had been divided; call stochastic_rounding before "
              "the Replicas are made");
  shards.check(*optimizer.torch_optimizer());
  if (gradients.overflowed()) return false;  // on all: the host knows what has been found in all pieces
  if (gradients.raw().empty()) return true;
  OptimizerOfShards of_shards(optimizer, shards);
  return take_step(of_shards, std::move(gradients));
}

}  // namespace gradaccum::detail
