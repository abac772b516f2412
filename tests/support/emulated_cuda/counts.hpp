// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace emulated_cuda {

/// What the devices did, and for what the host would have waited.
struct Counts {
  std::atomic<std::int64_t> waits = 0, copies_to_host = 0, copies_to_device = 0, launches = 0;
};

Counts& counts();

/// The host waits for a device. An error if this thread's stream is being captured.
void wait();
/// Of a kernel, unless it is captured.
void count_launch();
/// Whether what this thread issues is captured, not executed.
bool is_capturing();

}  // namespace emulated_cuda
