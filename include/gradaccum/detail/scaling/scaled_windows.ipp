// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/scaled_windows.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>

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

GRADACCUM_INLINE std::optional<at::Device> ScaledWindows::device_that_knows() const {
  for (auto& [optimizer, window] : windows_)
    if (const auto found = window.found_inf_on_device(); found.defined()) return found.device();
  return {};
}

GRADACCUM_INLINE at::Tensor ScaledWindows::found_inf(at::Device device) {
  auto on_host = heard_;
  at::Tensor found;
  const auto add = [&](const at::Tensor& one) { found = found.defined() ? at::maximum(found, one) : one; };
  for (auto& [optimizer, window] : windows_)
    if (const auto one = window.found_inf_on_device(); one.defined())
      add(one.to(device, /*non_blocking=*/true));
    else
      on_host = std::max(on_host, window.verdict());
  if (on_host != Verdict::none)
    add(at::full({}, on_host == Verdict::overflow, at::TensorOptions(at::kFloat).device(device)));
  return found;
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
