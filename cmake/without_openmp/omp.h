// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replaces OpenMP's header for compilers other than g++, whose OpenMP runtime would be loaded in addition to
// LibTorch's. The generated code then runs on one thread; matrix products, which LibTorch computes, still use all.
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
