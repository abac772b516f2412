// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>

namespace gradaccum::detail {

/// Defined in kernels.cu, which is part of `gradaccum::compiled` if CMake found a CUDA compiler.
extern const DeviceKernels cuda_kernels;

}  // namespace gradaccum::detail
