// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Before functions that a CUDA compiler compiles for devices, too. For others it is nothing.
#ifdef __CUDACC__
#define GRADACCUM_ON_DEVICE __host__ __device__
#else
#define GRADACCUM_ON_DEVICE
#endif

/// Before loops over arrays that are to be in a device's registers.
#ifdef __CUDA_ARCH__
#define GRADACCUM_UNROLL _Pragma("unroll")
#else
#define GRADACCUM_UNROLL
#endif
