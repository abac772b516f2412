// SPDX-License-Identifier: Apache-2.0
//
// All kernels of devices, in the namespace of who includes it.

#include <gradaccum/detail/kernels/device/thread_block.inl>
// kernels that processors have, too:
#include <gradaccum/detail/kernels/simd/adafactor.inl>
#include <gradaccum/detail/kernels/simd/adam.inl>
#include <gradaccum/detail/kernels/simd/eight_bit.inl>
#include <gradaccum/detail/kernels/simd/sgd.inl>
// and blocks of threads that run them:
#include <gradaccum/detail/kernels/device/eight_bit_codes.inl>
#include <gradaccum/detail/kernels/device/steps.inl>
#include <gradaccum/detail/kernels/device/window_end.inl>
// of which these use some:
#include <gradaccum/detail/kernels/device/adafactor.inl>
