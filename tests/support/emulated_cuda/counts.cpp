// SPDX-License-Identifier: Apache-2.0
#include "counts.hpp"

#include "emulated_cuda.hpp"

namespace emulated_cuda {

Counts& counts() {
  static Counts all;
  return all;
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
