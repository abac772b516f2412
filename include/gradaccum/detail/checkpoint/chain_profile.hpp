// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// Merges a stage into the previous one if neither saves the tensor between them, such as a linear layer and its
/// dropout: apart, that tensor would count although it is long freed. Also merges stages that change their input in
/// place, and stages before the first that needs gradients, since the input that a segment keeps counts where an
/// operation needs it.
Stages merged(const Stages& stages, const at::Tensor& input);

/// Measures the cost of each stage for inputs like this one, by running it a few times. Leaves gradients of parameters
/// unchanged; the caller restores random generators and running statistics.
StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/chain_profile.ipp>
#endif
