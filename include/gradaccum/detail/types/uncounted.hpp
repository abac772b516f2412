// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <optional>

namespace gradaccum::detail {

/// Returns the key under which a FlopCounter is found on a thread, and on autograd's threads in backward passes of it.
/// It is one that LibTorch leaves to tests, because version 2.8 has no others.
inline auto flops_key() { return c10::DebugInfoKind::TEST_INFO; }

/// Hides FlopCounters in a scope whose operations are not of the model's step: a checkpoint runs a part of the forward
/// pass again, or a step is tried out.
class UncountedScope {
 public:
  UncountedScope() {
    if (c10::ThreadLocalDebugInfo::get(flops_key()))
      guard_.emplace(flops_key(), std::make_shared<c10::DebugInfoBase>());
  }
  UncountedScope& operator=(UncountedScope&&) = delete;

 private:
  std::optional<c10::DebugInfoGuard> guard_;
};

}  // namespace gradaccum::detail
