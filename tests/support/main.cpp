// SPDX-License-Identifier: Apache-2.0
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

#include "support/emulated_cuda/emulated_cuda.hpp"

/// With a device where CTest asks for the emulated one.
int main(int argc, char* argv[]) {
  testing::emulated_cuda::load();
  return Catch::Session().run(argc, argv);
}
