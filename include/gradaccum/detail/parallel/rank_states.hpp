// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <string>

namespace gradaccum::detail {

class Links;

/// Combines the states of all ranks: rank 0's, and others' values that differ from it, under `rank_1.` and so on.
/// Parameters are equal on all ranks, as is an unsharded optimizer; random states and positions in the data differ.
///
/// Rank 0's archive receives the numbers and strings of the others. Tensors are not sent: another rank's archive keeps
/// only its own tensors that differ. Must be called on all ranks.
void gather_states(Links& links, Archive& archive);
/// Reduces the values that `gather_states` combined to those of one rank.
void pick_state(Archive::Values& values, int rank);

/// Serializes values for another rank of the same program. All tensors must be undefined.
std::string pack(const Archive::Values& values);
Archive::Values unpack(const std::string& bytes);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/rank_states.ipp>
#endif
