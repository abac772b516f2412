// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/scaled_windows.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE ScaledWindow& ScaledWindows::of(const void* optimizer) {
  auto& window = windows_[optimizer];
  if (window.closed() && window.stage != ScaledWindow::Stage::stepped) {
    hear(window.verdict());
    window = {};
  }
  return window;
}

GRADACCUM_INLINE void ScaledWindows::hear(Verdict verdict) { heard_ = std::max(heard_, verdict); }

GRADACCUM_INLINE Verdict ScaledWindows::verdict() {
  auto result = heard_;
  for (auto& [optimizer, window] : windows_) result = std::max(result, window.verdict());
  return result;
}

GRADACCUM_INLINE bool ScaledWindows::any_open() const {
  return std::any_of(windows_.begin(), windows_.end(), [](auto& window) { return window.second.open(); });
}

GRADACCUM_INLINE void ScaledWindows::discard_open() {
  for (auto& [optimizer, window] : windows_)
    if (window.open()) window.end();
}

GRADACCUM_INLINE void ScaledWindows::forget_closed(Verdict heard) {
  std::erase_if(windows_, [](auto& window) { return !window.second.open(); });
  heard_ = heard;
}

}  // namespace gradaccum::detail
