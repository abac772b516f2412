// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gradaccum {

/// The state that the processes divide rather than replicate: `ga::DataParallel{.shard = …}`.
enum class Shard {
  none,       ///< nothing: each process has all
  optimizer,  ///< the optimizer's state: each process keeps and steps its own part of the parameters
  gradients,  ///< the optimizer's state and, between micro-batches, the gradients
};

}  // namespace gradaccum
