// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>

namespace gradaccum::detail {

/// Of kernels.cu, which `gradaccum::compiled` has where CMake has found a CUDA compiler.
extern const DeviceKernels cuda_kernels;

}  // namespace gradaccum::detail
