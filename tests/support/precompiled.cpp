// SPDX-License-Identifier: Apache-2.0

// CMake precompiles headers for a target that has a file to use them in.

#include "support/emulated_cuda/emulated_cuda.hpp"

#include <gradaccum/detail/kernels/device_kernels.hpp>

void use_emulated_kernels();

/// Devices have the library's own kernels from now on.
void use_emulated_kernels() { gradaccum::detail::set_device_kernels(&testing::emulated_cuda::kernels()); }
