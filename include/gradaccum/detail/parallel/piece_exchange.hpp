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

/// Sends the pieces that each rank has stepped to all others, after a sharded step of these parameters. A large piece
/// is sent in place; a rank's small pieces are copied together, with at most `bucket_bytes` of copies in flight.
void exchange_pieces(Links& links, Links::Line line, const Shards& shards, const std::vector<std::size_t>& places,
                     std::int64_t bucket_bytes);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/piece_exchange.ipp>
#endif
