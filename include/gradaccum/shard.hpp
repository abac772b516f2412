// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gradaccum {

/// What of a training each process has a part of alone, in place of all: `ga::DataParallel{.shard = …}`.
enum class Shard {
  none,       ///< each has all
  optimizer,  ///< each keeps the optimizer's state of its own part of the parameters, and steps that part
  gradients,  ///< that, and between micro-batches the gradients of that part
};

}  // namespace gradaccum
