// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/shard.hpp>

#include <cstdint>

namespace gradaccum {

/// Options for sending gradients, seeding the ranks, and sharding.
struct ReplicasOptions {
  /// The largest number of bytes of gradients that are sent together; >= 1. With `shard` it also limits the bytes in
  /// flight: a larger gradient is sent in parts if it is split, and backward waits for the first of them.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  bool overlap = true;        ///< send gradients while the backward that fills the window still runs
  bool seed_by_rank = true;   ///< add each rank's number to its random seeds, so that ranks draw different numbers
  Shard shard = Shard::none;  ///< state that ranks divide rather than replicate
};

}  // namespace gradaccum
