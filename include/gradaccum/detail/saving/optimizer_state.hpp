// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/pieces.hpp>

#include <torch/optim/optimizer.h>

namespace gradaccum::detail {

class Shards;

/// Saves or loads the state of LibTorch's and this library's optimizers by parameter name, and the options of their
/// groups. With `shards`, saves only this rank's pieces. Loads a state that was saved whole or in pieces.
void archive_optimizer(Archive& archive, torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                       Shards* shards = nullptr);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/saving/optimizer_state.ipp>
#endif
