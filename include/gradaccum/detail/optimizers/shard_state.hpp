// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/window/shards.hpp>

namespace gradaccum::detail {

/// What an optimizer that steps shards keeps, by names: `exp_avg.0.weight[4096:8192 of 64x128]`.

/// This rank's pieces with their names.
NamedParameters named_pieces(const Shards& shards, const NamedParameters& parameters);

/// Of a state what belongs to this rank's pieces, whether it has been saved whole or in pieces. If not `lenient`,
/// throws for what belongs to none of the parameters.
NamedTensors own_part(NamedTensors state, const Shards& shards, const NamedParameters& parameters, bool lenient);

/// A state in pieces, as a program has it that is not divided.
NamedTensors whole_state(NamedTensors state);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/shard_state.ipp>
#endif
