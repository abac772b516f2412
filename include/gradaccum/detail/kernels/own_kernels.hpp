// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/steps.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <gradaccum/detail/kernels/on_device.hpp>

/// The kernels for any processor once more, which a program compiles for steps of its own, with its own flags.
namespace gradaccum::detail::own_kernels {
#include <gradaccum/detail/kernels/simd/portable.inl>
// files that use those above:
#include <gradaccum/detail/kernels/simd/kernels.inl>
}  // namespace gradaccum::detail::own_kernels

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL
