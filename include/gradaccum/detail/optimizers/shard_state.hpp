// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/window/shards.hpp>

namespace gradaccum::detail {

/// The state of an optimizer that steps shards, with names such as `exp_avg.0.weight[4096:8192 of 64x128]`.

/// Returns this rank's pieces with their names.
NamedParameters named_pieces(const Shards& shards, const NamedParameters& parameters);

/// Returns the part of a state that belongs to this rank's pieces. The state may have been saved whole or in pieces.
/// Throws for tensors of unknown parameters or other shapes; if `lenient`, omits them.
NamedTensors own_part(NamedTensors state, const Shards& shards, const NamedParameters& parameters, bool lenient);

/// Joins the pieces of a state, for an optimizer that is not sharded.
NamedTensors whole_state(NamedTensors state);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/shard_state.ipp>
#endif
