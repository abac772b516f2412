// SPDX-License-Identifier: Apache-2.0
//
// Which kernel it is to be. Included by who has kernels.

/// `Of<P, G, rounded>::run` for the types of a parameter, but float64, and of its gradient, which may be a float32 sum
/// where the parameter has 16 bits. `rounded`: of bfloat16 parameters that are rounded stochastically.
template <class Function, template <class P, class G, bool rounded> class Of>
Function* of_narrow_types(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  using at::BFloat16, at::Half;
  const bool same = parameter == gradient;
  if (rounded) return same ? Of<BFloat16, BFloat16, true>::run : Of<BFloat16, float, true>::run;
  if (parameter == at::kFloat) return Of<float, float, false>::run;
  if (parameter == at::kHalf) return same ? Of<Half, Half, false>::run : Of<Half, float, false>::run;
  return same ? Of<BFloat16, BFloat16, false>::run : Of<BFloat16, float, false>::run;
}
template <class Function, template <class P, class G, bool rounded> class Of>
Function* of_types(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  if (parameter == at::kDouble) return Of<double, double, false>::run;
  return of_narrow_types<Function, Of>(parameter, gradient, rounded);
}
