// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/shard.hpp>

#include <cstdint>

namespace gradaccum {

/// How gradients are sent, what differs between the copies, and what is divided among them.
struct ReplicasOptions {
  /// Gradients that are sent together, at most; >= 1. With `shard` also what is under way of them: a larger gradient
  /// goes part by part if it is cut, and backward waits for the first.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  bool overlap = true;        ///< send gradients while the backward that fills the window goes on
  bool seed_by_rank = true;   ///< random numbers of their own: rank r adds r to its generators' seeds
  Shard shard = Shard::none;  ///< what the ranks divide, in place of having all of it each
};

}  // namespace gradaccum
