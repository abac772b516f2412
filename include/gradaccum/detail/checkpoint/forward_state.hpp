// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>

#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The state of the default random generators of the CPU and of all CUDA devices in use.
///
/// Copies the CPU's state field by field: a tensor from `Generator::get_state` would count as the model's memory.
class RandomState {
 public:
  RandomState();
  void restore() const;
  bool operator==(const RandomState& other) const;

  /// A number that identifies a position in the CPU's stream of random numbers. Cheaper than the state.
  static std::uint64_t place();

 private:
  at::mt19937_data_pod engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
  std::vector<std::pair<c10::DeviceIndex, at::Tensor>> devices_;
};

/// Restores a random state for a scope.
class [[nodiscard]] RandomScope {
 public:
  explicit RandomScope(const RandomState& state) { state.restore(); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;
  ~RandomScope() { around_.restore(); }

 private:
  RandomState around_;
};

/// The state on which a forward pass depends besides its inputs: autocast, the current device and, if requested, random
/// generators.
class ForwardState {
 public:
  explicit ForwardState(bool with_random_generators);

  /// Ends the forward pass, and drops the state of random generators if it did not use them. Returns whether it did.
  bool finish();

  /// Restores the state for a scope, with gradients enabled, on the thread that runs backward.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const ForwardState& state);

   private:
    at::AutoGradMode gradients_{true};
    Autocast cpu_, cuda_;
    c10::OptionalDeviceGuard device_;
    std::optional<RandomScope> random_;
  };

 private:
  struct AutocastSettings {
    explicit AutocastSettings(at::DeviceType device);
    bool enabled;
    at::ScalarType dtype;
    bool cached;

    Autocast scope(at::DeviceType device) const { return Autocast(device, dtype, enabled, cached); }
  };

  AutocastSettings cpu_{at::kCPU}, cuda_{at::kCUDA};
  std::optional<at::Device> device_;
  std::unique_ptr<RandomState> random_;  // 2.5 kB
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/forward_state.ipp>
#endif
