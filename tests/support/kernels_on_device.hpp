// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw8bit.hpp>

#include "support/emulated_cuda/emulated_cuda.hpp"

#include <torch/cuda.h>

#include <cstddef>
#include <type_traits>

namespace testing {

/// Gives devices the library's kernels while it lives: those compiled for a GPU, or on the emulated device those that
/// run on the host; or none.
class KernelsOnDevice {
 public:
  static bool possible() { return emulated_cuda::is_loaded() || (gradaccum::detail::device_kernels() && has_gpu()); }
  static constexpr const char* missing = "needs a GPU and kernels for it (GRADACCUM_CUDA=ON), or the emulated device";
  /// The reason to skip a test on a GPU.
  static constexpr const char* only_emulated = "only the emulated device counts launches, waits and allocations";

  KernelsOnDevice() { gradaccum::detail::set_device_kernels(&kernels()); }
  explicit KernelsOnDevice(std::nullptr_t) { gradaccum::detail::set_device_kernels(nullptr); }
  KernelsOnDevice(const KernelsOnDevice&) = delete;
  KernelsOnDevice& operator=(const KernelsOnDevice&) = delete;
  ~KernelsOnDevice() { gradaccum::detail::set_device_kernels(before_); }

  static const gradaccum::detail::DeviceKernels& kernels() {
    return emulated_cuda::is_loaded() ? emulated_cuda::kernels() : *gradaccum::detail::device_kernels();
  }
  /// Returns the stream that the kernels run on.
  static void* stream() {
    return emulated_cuda::is_loaded() ? nullptr : gradaccum::detail::native_stream(at::Device(at::kCUDA, 0));
  }

 private:
  static bool has_gpu() { return torch::cuda::is_available(); }

  const gradaccum::detail::DeviceKernels* before_ = gradaccum::detail::device_kernels();
};

/// True for optimizers that ATen lacks, which step on devices only by the library's kernels.
template <class Optimizer>
inline constexpr bool needs_kernels =
    std::is_same_v<Optimizer, gradaccum::optim::Adafactor> || std::is_same_v<Optimizer, gradaccum::optim::Adam8bit> ||
    std::is_same_v<Optimizer, gradaccum::optim::AdamW8bit>;

/// Returns whether an optimizer steps on devices now. CTest runs tests of all optimizers without kernels and with them.
template <class Optimizer>
bool steps_on_devices() {
  return !needs_kernels<Optimizer> || gradaccum::detail::device_kernels();
}

}  // namespace testing
