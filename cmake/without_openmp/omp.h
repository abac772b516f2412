// SPDX-License-Identifier: Apache-2.0
#pragma once

// What generated code asks of OpenMP, where a compiler other than g++ would bring a second OpenMP beside LibTorch's:
// the code then runs on one thread, beside matrix products, which LibTorch computes on all.
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
