// SPDX-License-Identifier: Apache-2.0
//
// GRADACCUM_ON_DEVICE marks functions that a CUDA compiler also compiles for devices, and GRADACCUM_UNROLL loops over
// arrays that must stay in registers. Headers include this file last and undefine both macros at their ends,
// so that no program sees them.

#ifdef __CUDACC__
#define GRADACCUM_ON_DEVICE __host__ __device__
#else
#define GRADACCUM_ON_DEVICE
#endif

#ifdef __CUDA_ARCH__
#define GRADACCUM_UNROLL _Pragma("unroll")
#elif defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define GRADACCUM_UNROLL _Pragma("GCC unroll 8")
#else
#define GRADACCUM_UNROLL
#endif
