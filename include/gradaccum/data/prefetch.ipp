// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/data/prefetch.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/draw_watch.hpp>

namespace gradaccum::detail {

GRADACCUM_INLINE void check_prefetch(const data::PrefetchOptions& options) {
  TORCH_CHECK(options.depth >= 1, "Prefetch: depth must be >= 1, got ", options.depth);
}

/// Throws after the draw, which cannot be undone: it changes the random numbers of the training.
GRADACCUM_INLINE void make_without_draws(c10::function_ref<void()> make) {
  const DrawWatch watch;
  make();
  TORCH_CHECK(watch.drawn().empty(),
              "Prefetch: a batch that is prepared ahead must not draw from LibTorch's default generators, which the "
              "training draws from at the same time, and ",
              watch.drawn(),
              " did; give the range a generator of its own (at::make_generator), or let it draw, in another order than "
              "without Prefetch, by {.allow_draws = true}");
}

}  // namespace gradaccum::detail
