// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: kernels

#include <cstdlib>
#include <string_view>

/// Makes MKL use its fast code on AMD processors: include this file in one file of a program.
///
///     const auto weight = torch::randn({512, 512});         // #include <gradaccum/mkl_on_amd.hpp> beside main()
///     auto hidden = torch::rand({64, 512});
///     for (int layer = 0; layer < 3; ++layer) hidden = torch::mm(hidden, weight).tanh();
///
/// LibTorch uses MKL for float32 and float64 matrix products, decompositions and Fourier transforms. MKL calls this
/// function to check for an Intel processor, and otherwise runs its slowest code, at less than half the rate. This
/// definition precedes MKL's and always returns true; MKL then selects code by the available instructions. Results
/// change by rounding only. 16-bit products, convolutions and other operations do not use MKL, and do not change.
///
/// The interface is undocumented. It works with LibTorch 2.11.0 and 2.15.0; with other versions, without MKL or on
/// other processors it may have no effect. `./bootstrap.sh doctor` measures the gain. The definition applies to the
/// whole process, so no other header includes it, and it must be in the program itself, since a shared library's may be
/// found after MKL's. GRADACCUM_MKL_ON_AMD=0 in the environment disables it.
extern "C" [[gnu::used, gnu::visibility("default")]] inline int mkl_serv_intel_cpu_true() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool left_out = [] {
    const char* const wish = std::getenv("GRADACCUM_MKL_ON_AMD");
    return wish != nullptr && std::string_view(wish) == "0";
  }();
  if (left_out) return __builtin_cpu_is("intel") ? 1 : 0;
#endif
  return 1;
}

namespace gradaccum {

/// Returns true on an AMD processor, unless the environment disables this file: MKL, if present, then runs fast code.
inline bool mkl_on_amd() {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_is("amd") && mkl_serv_intel_cpu_true() != 0;
#else
  return false;
#endif
}

}  // namespace gradaccum
