// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace emulated_cuda {

/// Counts the devices' work and the host's waits.
struct Counts {
  std::atomic<std::int64_t> waits = 0, copies_to_host = 0, copies_to_device = 0, launches = 0;
};

Counts& counts();

/// Counts a wait of the host. Throws if this thread's stream is being captured.
void wait();
/// Counts a kernel launch, unless it is captured.
void count_launch();
/// Returns whether this thread's work is captured instead of executed.
bool is_capturing();

}  // namespace emulated_cuda
