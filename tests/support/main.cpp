// SPDX-License-Identifier: Apache-2.0
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

#include "support/emulated_cuda/emulated_cuda.hpp"

#include <cstdlib>

/// Defined in programs that are linked with precompiled.cpp.
[[gnu::weak]] void use_emulated_kernels();

/// Runs the tests, with the emulated device and the library's kernels for it if CTest asks for them.
int main(int argc, char* argv[]) {
  testing::emulated_cuda::load();
  if (std::getenv("GRADACCUM_EMULATED_KERNELS") && use_emulated_kernels) use_emulated_kernels();
  return Catch::Session().run(argc, argv);
}
