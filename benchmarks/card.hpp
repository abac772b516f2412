// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>
#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "harness.hpp"

/// Shared by the benchmarks on a CUDA device.
namespace harness {

inline const at::Device device(at::kCUDA, 0);

/// Returns whether there is a device; prints a line if not.
inline bool is_there(const std::string& benchmark) {
  if (!torch::cuda::is_available()) {
    fmt::print("{}: there is no CUDA device that LibTorch can use, so nothing is measured\n", benchmark);
    return false;
  }
  if (!gradaccum::detail::device_kernels())
    fmt::print(
        "{}: this program has no kernels for it (GRADACCUM_CUDA), so all is by ATen, without the steps that it lacks\n",
        benchmark);
  return true;
}

/// Returns the card's name, driver and clocks from nvidia-smi. Call it right after the measured work, because the
/// clocks are the current ones.
inline std::string card() {
  const auto* const command =
      "id=${CUDA_VISIBLE_DEVICES%%,*}; nvidia-smi --id=${id:-0} --format=csv,noheader --query-gpu=name,driver_version,"
      "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu 2> /dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), pclose);
  char line[512];
  if (!pipe || !std::fgets(line, sizeof line, pipe.get())) return "unknown, as nvidia-smi tells nothing";
  std::string text = line;
  text.erase(text.find_last_not_of("\n") + 1);
  return text + " C";
}

inline void print_card() {
  fmt::print("  card (driver, SM clock of at most, memory clock, power of at most): {}\n", card());
  std::fflush(stdout);
}

}  // namespace harness
