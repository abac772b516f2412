// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <string_view>

/// On an AMD processor makes MKL, by which LibTorch multiplies float32 and float64 matrices, as fast as the processor
/// can: include this file in one file of a program.
///
///     const auto weight = torch::randn({512, 512});         // #include <gradaccum/mkl_on_amd.hpp> beside main()
///     auto hidden = torch::rand({64, 512});
///     for (int layer = 0; layer < 3; ++layer) hidden = torch::mm(hidden, weight).tanh();
///
/// MKL asks this function whether the processor is Intel's, and takes code of its slowest kind where it is not: less
/// than half the rate. The program's answer comes before MKL's own, and is always yes; MKL then looks at the
/// instructions that there are. Results stay those of the dtype, to rounding; other code of MKL's (decompositions,
/// Fourier transforms) follows the same answer. Products of 16 bits, convolutions and all else are not MKL's, and keep
/// their bits.
///
/// Nobody has promised this interface: it works with LibTorch 2.11.0 and 2.15.0, and where it does not, or there is no
/// MKL, or the processor is another, nothing happens. `./bootstrap.sh doctor` measures the gain. It acts on the whole
/// process, so no file of ours includes it, and has to be in the program itself: in a library of yours it may come
/// after MKL's own. GRADACCUM_MKL_ON_AMD=0 in the environment leaves it out.
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

/// Whether MKL, if LibTorch has it, owes its rate to this file: on an AMD processor, where it is not left out.
inline bool mkl_on_amd() {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_is("amd") && mkl_serv_intel_cpu_true() != 0;
#else
  return false;
#endif
}

}  // namespace gradaccum
