// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <string>

namespace gradaccum::detail {

class Links;

/// States of several ranks in one: rank 0's, and of the others what differs from it, under `rank_1.` and so on.
/// Parameters are the same on all, and so is the optimizer where it is not divided; random numbers and the place in the
/// data are not.
///
/// Rank 0's archive gets the numbers and texts that the others have. Tensors stay where they are: that of another rank
/// has its own, and nothing else. All ranks call it.
void gather_states(Links& links, Archive& archive);
/// Of what `gather_states` made, this rank's.
void pick_state(Archive::Values& values, int rank);

/// Values as bytes, for another rank of the same program; of tensors only those that are undefined.
std::string pack(const Archive::Values& values);
Archive::Values unpack(const std::string& bytes);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/rank_states.ipp>
#endif
