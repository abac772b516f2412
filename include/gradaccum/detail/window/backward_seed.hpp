// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/multiplier.hpp>

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <utility>

namespace gradaccum::detail {

/// The seed of a backward pass, which c10 brings to autograd's threads.
struct BackwardSeed : c10::DebugInfoBase {
  BackwardSeed(Multiplier of_pass, at::Device of_loss) : seed(std::move(of_pass)), device(of_loss) {}
  /// Returns a key that LibTorch leaves to tests, because version 2.8 has no others.
  static auto key() { return c10::DebugInfoKind::TEST_INFO_2; }

  Multiplier seed;
  at::Device device;
};

/// Sets the seed that `backward_seed()` returns in a scope.
struct BackwardSeedScope : c10::DebugInfoGuard {
  BackwardSeedScope(Multiplier seed, at::Device device)
      : DebugInfoGuard(BackwardSeed::key(), std::make_shared<BackwardSeed>(std::move(seed), device)) {}
};

}  // namespace gradaccum::detail
