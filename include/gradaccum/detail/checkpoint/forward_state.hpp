// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/checkpoint/random_state.hpp>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>

namespace gradaccum::detail {

/// What operations of a forward pass depend on beside their inputs: autocast, the current device and, if asked, random
/// generators.
class ForwardState {
 public:
  explicit ForwardState(bool with_random_generators) {
    if (at::globalContext().hasCUDA()) device_ = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
    if (with_random_generators) random_ = std::make_unique<RandomState>();
  }

  /// The forward pass is over: generators that it did not use need not be kept. Returns whether it used them.
  bool finish() {
    if (random_ && *random_ == RandomState()) random_.reset();
    return random_ != nullptr;
  }

  /// Brings it all back for a scope, with gradients enabled, on whatever thread backward runs.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const ForwardState& state)
        : cpu_(state.cpu_.scope(at::kCPU)), cuda_(state.cuda_.scope(at::kCUDA)), device_(state.device_) {
      if (state.random_) random_.emplace(*state.random_);
    }

   private:
    at::AutoGradMode gradients_{true};
    Autocast cpu_, cuda_;
    c10::OptionalDeviceGuard device_;
    std::optional<RandomScope> random_;
  };

 private:
  struct AutocastSettings {
    explicit AutocastSettings(at::DeviceType device)
        : enabled(at::autocast::is_autocast_enabled(device)), dtype(at::autocast::get_autocast_dtype(device)) {}
    bool enabled;
    at::ScalarType dtype;
    bool cached = at::autocast::is_autocast_cache_enabled();

    Autocast scope(at::DeviceType device) const { return Autocast(device, dtype, enabled, cached); }
  };

  AutocastSettings cpu_{at::kCPU}, cuda_{at::kCUDA};
  std::optional<at::Device> device_;
  std::unique_ptr<RandomState> random_;  // 2.5 kB
};

}  // namespace gradaccum::detail
