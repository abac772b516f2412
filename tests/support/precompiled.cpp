// SPDX-License-Identifier: Apache-2.0

// Gives CMake a file to precompile headers with.

#include "support/emulated_cuda/emulated_cuda.hpp"

#include <gradaccum/detail/kernels/device_kernels.hpp>

void use_emulated_kernels();

/// Gives devices the library's kernels from now on.
void use_emulated_kernels() { gradaccum::detail::set_device_kernels(&testing::emulated_cuda::kernels()); }
