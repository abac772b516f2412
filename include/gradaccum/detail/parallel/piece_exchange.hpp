// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/links.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

class Shards;

/// After a step of shards: each rank sends the pieces of these parameters that it has stepped to all others. A large
/// piece goes from where it lies; small ones of a rank are copied together, of which at most `bucket_bytes` are under
/// way.
void exchange_pieces(Links& links, Links::Line line, const Shards& shards, const std::vector<std::size_t>& places,
                     std::int64_t bucket_bytes);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/piece_exchange.ipp>
#endif
