// SPDX-License-Identifier: Apache-2.0
//
// GRADACCUM_ON_DEVICE stands before functions that a CUDA compiler compiles for devices, too, and GRADACCUM_UNROLL before
// loops over arrays that are to be in a device's registers. Headers include this file last, and take both macros back at
// their ends, so that no program sees them.

#ifdef __CUDACC__
#define GRADACCUM_ON_DEVICE __host__ __device__
#else
#define GRADACCUM_ON_DEVICE
#endif

#ifdef __CUDA_ARCH__
#define GRADACCUM_UNROLL _Pragma("unroll")
#else
#define GRADACCUM_UNROLL
#endif
