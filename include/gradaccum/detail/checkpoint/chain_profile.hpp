// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// Merges a stage into the one before, if that does not keep the output and this one does not need it: a layer of
/// weights and the dropout behind it. Apart, that output would have to be counted while it is long gone. Also if it
/// writes over that output, and as long as there are no gradients: a segment's input is kept then, which is paid for
/// where an operation needs it.
Stages merged(const Stages& stages, const at::Tensor& input);

/// What each stage of a chain costs, for inputs like this one. Runs each of them a few times, and leaves no trace:
/// random generators and running statistics stay where they are, and no gradient of a parameter changes.
StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/chain_profile.ipp>
#endif
