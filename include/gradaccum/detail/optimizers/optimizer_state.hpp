// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/named_state.hpp>

#include <torch/optim/optimizer.h>

namespace gradaccum::detail {

class Shards;

/// Throws if the optimizer's state cannot be saved, or if one of its parameters has no name.
void check_has_named_state(torch::optim::Optimizer& optimizer, const NamedParameters& parameters);

/// Saves or loads the state of LibTorch's and our own optimizers by parameter name, and the options of their groups.
/// With `shards`, saves only this process's pieces. Loads a state that was saved whole or in pieces.
void archive_optimizer(Archive& archive, torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                       Shards* shards = nullptr);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/optimizer_state.ipp>
#endif
