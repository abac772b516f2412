// SPDX-License-Identifier: Apache-2.0
#include "counts.hpp"

#include "address_range.hpp"
#include "emulated_cuda.hpp"
#include "graphs.hpp"

namespace emulated_cuda {

Counts& counts() {
  static Counts all;
  return all;
}

void wait() {
  Graph::refuse_in_captures();
  ++counts().waits;
}

void count_launch() {
  if (!is_capturing()) ++counts().launches;
}

bool is_capturing() {
  for (c10::DeviceIndex device = 0; device < number_of_devices; ++device)
    if (Graph::capturing(device)) return true;
  return false;
}

}  // namespace emulated_cuda

EmulatedCudaCounts emulated_cuda_counts() {
  const auto& all = emulated_cuda::counts();
  return {all.waits, all.copies_to_host, all.copies_to_device, all.launches};
}

void emulated_cuda_reset_counts() {
  auto& all = emulated_cuda::counts();
  for (auto* count : {&all.waits, &all.copies_to_host, &all.copies_to_device, &all.launches}) *count = 0;
}
