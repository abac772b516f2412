// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/scaled_window.hpp>

#include <algorithm>
#include <map>
#include <type_traits>

namespace gradaccum::detail {

/// The windows of all optimizers that a loss scaler has met since its scale could last change.
class ScaledWindows {
 public:
  /// The optimizer's window. One that was flushed or discarded behind the scaler's back is heard, and makes way.
  template <class Optimizer>
  ScaledWindow& of(const Optimizer& optimizer) {
    auto& window = windows_[address_of(optimizer)];
    if (window.closed() && window.stage != ScaledWindow::Stage::stepped) {
      hear(window.verdict());
      window = {};
    }
    return window;
  }

  void hear(Verdict verdict) { heard_ = std::max(heard_, verdict); }

  /// Of all windows that have one.
  Verdict verdict() {
    auto result = heard_;
    for (auto& [optimizer, window] : windows_) result = std::max(result, window.verdict());
    return result;
  }
  bool any_open() const {
    return std::any_of(windows_.begin(), windows_.end(), [](auto& window) { return window.second.open(); });
  }
  void discard_open() {
    for (auto& [optimizer, window] : windows_)
      if (window.open()) window.end();
  }
  /// Windows that are still open stay; `heard` is what the others leave behind.
  void forget_closed(Verdict heard) {
    std::erase_if(windows_, [](auto& window) { return !window.second.open(); });
    heard_ = heard;
  }

 private:
  /// The same one through a reference to any of its base classes.
  template <class Optimizer>
  static const void* address_of(const Optimizer& optimizer) {
    if constexpr (std::is_polymorphic_v<Optimizer>)
      return dynamic_cast<const void*>(&optimizer);
    else
      return &optimizer;
  }

  std::map<const void*, ScaledWindow> windows_;
  Verdict heard_ = Verdict::none;
};

}  // namespace gradaccum::detail
