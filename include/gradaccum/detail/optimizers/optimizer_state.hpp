// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/named_state.hpp>

#include <torch/optim/optimizer.h>

namespace gradaccum::detail {

class Shards;

/// Throws for an optimizer whose state nobody could save, or has no names.
void check_has_named_state(torch::optim::Optimizer& optimizer, const NamedParameters& parameters);

/// The state of LibTorch's and our own optimizers by the parameters' names, and the options of their groups. `shards`:
/// those that it steps; this process's alone are saved. What is loaded is of whole parameters.
void archive_optimizer(Archive& archive, torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                       Shards* shards = nullptr);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/optimizer_state.ipp>
#endif
