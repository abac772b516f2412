// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/optimizer_of_shards.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/shards.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>

#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void OptimizerOfShards::step(const Gradients& gradients) {
  shards_.with_own(*optimizer_.torch_optimizer(), [&] {
    if (!takes_gradients()) {
      if (!gradients.raw().empty()) optimizer_.step(gradients);
      return stepped_(places_);
    }
    std::vector<std::size_t> some;
    std::int64_t elements = 0;
    for (auto place : places_) {
      some.push_back(place);
      elements += shards_.parameters()[place].numel();
      if (elements < enough && place != places_.back()) continue;
      step_some(some);
      some.clear(), elements = 0;
    }
  });
}

GRADACCUM_INLINE void OptimizerOfShards::step_some(const std::vector<std::size_t>& places) {
  const Gradients own(window_->part(places));
  if (!own.raw().empty()) optimizer_.step(own);
  stepped_(places);
}

GRADACCUM_INLINE bool take_step_of_shards(AnyOptimizer& optimizer, Shards& shards,
                                          const std::shared_ptr<WindowGradients>& window,
                                          const std::vector<std::size_t>& places, SteppedPlaces stepped) {
  TORCH_CHECK(optimizer.steps_by_elements() || !shards.any_is_cut(), "Shard: ", optimizer.name(),
              " was made to look at whole parameters after they had been divided; call stochastic_rounding before "
              "the Replicas are made");
  shards.check(*optimizer.torch_optimizer());
  Gradients gradients(window);
  if (places.empty() || gradients.overflowed()) return false;  // on all: the host knows what was found in all pieces
  OptimizerOfShards of_shards(optimizer, shards, window, places, stepped);
  if (!of_shards.takes_gradients()) gradients.apply();
  of_shards.step(gradients);
  return true;
}

}  // namespace gradaccum::detail
