// SPDX-License-Identifier: Apache-2.0
//
// All kernels, for the vectors of the including file: kernels.ipp includes it for each instruction set.

#include <gradaccum/detail/kernels/simd/types.inl>
// files that use those above:
#include <gradaccum/detail/kernels/simd/eight_bit.inl>
#include <gradaccum/detail/kernels/simd/loops.inl>
// files that use those above:
#include <gradaccum/detail/kernels/simd/adafactor.inl>
#include <gradaccum/detail/kernels/simd/adafactor_passes.inl>
#include <gradaccum/detail/kernels/simd/adam.inl>
#include <gradaccum/detail/kernels/simd/adam8bit.inl>
#include <gradaccum/detail/kernels/simd/sgd.inl>

inline AdamKernel adam_kernel(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  return of_types<std::remove_pointer_t<AdamKernel>, AdamOfTypes>(parameter, gradient, rounded);
}
inline Adam8bitKernel adam8bit_kernel(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  return of_narrow_types<std::remove_pointer_t<Adam8bitKernel>, Adam8bitOfTypes>(parameter, gradient, rounded);
}
inline SgdKernel sgd_kernel(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  return of_types<std::remove_pointer_t<SgdKernel>, SgdOfTypes>(parameter, gradient, rounded);
}
inline AdafactorKernels adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  return of_types<AdafactorKernels(), AdafactorIn<>::OfTypes>(parameter, gradient, rounded)();
}
