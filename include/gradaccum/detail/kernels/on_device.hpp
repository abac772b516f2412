// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Before functions that a CUDA compiler compiles for devices, too. For others it is nothing.
#ifdef __CUDACC__
#define GRADACCUM_ON_DEVICE __host__ __device__
#else
#define GRADACCUM_ON_DEVICE
#endif
