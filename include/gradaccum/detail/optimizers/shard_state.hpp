// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/window/shards.hpp>

namespace gradaccum::detail {

/// What an optimizer that steps shards keeps, by names: `exp_avg.0.weight[4096:8192 of 64x128]`.

/// This rank's pieces with their names.
NamedParameters named_pieces(const Shards& shards, const NamedParameters& parameters);

/// Of a state of whole parameters what belongs to this rank's pieces. If not `lenient`, throws for what belongs to
/// none of the parameters.
NamedTensors own_part(const NamedTensors& state, const Shards& shards, const NamedParameters& parameters, bool lenient);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/shard_state.ipp>
#endif
