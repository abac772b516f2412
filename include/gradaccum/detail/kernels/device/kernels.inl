// SPDX-License-Identifier: Apache-2.0
//
// All device kernels, in the namespace of the including file.

#include <gradaccum/detail/kernels/device/thread_block.inl>
// kernels shared with the CPU:
#include <gradaccum/detail/kernels/simd/adafactor.inl>
#include <gradaccum/detail/kernels/simd/adam.inl>
#include <gradaccum/detail/kernels/simd/eight_bit.inl>
#include <gradaccum/detail/kernels/simd/sgd.inl>
// thread blocks that run them:
#include <gradaccum/detail/kernels/device/eight_bit_codes.inl>
#include <gradaccum/detail/kernels/device/steps.inl>
#include <gradaccum/detail/kernels/device/window_end.inl>
// files that use those above:
#include <gradaccum/detail/kernels/device/adafactor.inl>
