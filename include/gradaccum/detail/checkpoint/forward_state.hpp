// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

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
  static std::uint64_t position();

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
    at::DeviceType device;
    bool enabled = at::autocast::is_autocast_enabled(device);
    at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  };

  AutocastSettings cpu_{at::kCPU}, cuda_{at::kCUDA};
  bool autocast_caches_ = at::autocast::is_autocast_cache_enabled();
  std::optional<at::Device> device_;
  std::unique_ptr<RandomState> random_;  // 2.5 kB
};

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors);

/// Restores the state that forward passes change besides gradients: random generators, and a model's buffers, such as
/// BatchNorm's statistics. Holds a copy of the buffers.
class ForwardUndo {
 public:
  explicit ForwardUndo(const std::vector<at::Tensor>& buffers) : buffers_(buffers), values_(copies_of(buffers)) {}
  void put_back() const;

 private:
  std::vector<at::Tensor> buffers_, values_;
  RandomState random_;
};

/// Copies of the running statistics of normalisation layers.
std::vector<at::Tensor> copied_statistics(const std::vector<torch::nn::Module*>& modules);

/// Makes normalisation layers update copies of their running statistics for a scope, so that a repeated forward pass
/// does not count twice.
///
/// Exchanges the layers' handles rather than restoring values: autograd saves the values, and would take restoring them
/// for an in-place change.
class [[nodiscard]] FrozenStatistics {
 public:
  /// `start` (from `copied_statistics`) holds the copies' initial values; if empty, they start from the current ones.
  explicit FrozenStatistics(const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& start = {});
  FrozenStatistics(const FrozenStatistics&) = delete;
  FrozenStatistics& operator=(const FrozenStatistics&) = delete;
  ~FrozenStatistics();

 private:
  FrozenStatistics() = default;  // makes the destructor run even if the other constructor throws

  std::vector<std::pair<at::Tensor*, at::Tensor>> exchanged_;
};

/// The properties that a tensor must share with one that takes its place.
class TensorTraits {
 public:
  TensorTraits() = default;
  explicit TensorTraits(const at::Tensor& tensor);
  bool operator==(const TensorTraits&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const TensorTraits& traits);

 private:
  at::DimVector shape_;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

/// Detects whether a tensor was changed in place since construction, without keeping its memory.
///
/// LibTorch checks this for tensors that it saves itself, but not for those that hooks save.
class TensorVersion {
 public:
  TensorVersion() = default;
  explicit TensorVersion(const at::Tensor& tensor);
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }

 private:
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  std::uint32_t version_ = 0;
};

/// A hash of a tensor's bytes: different bytes collide with a chance of 2^-64. Waits for the device.
///
/// Returns 0 for tensors that cannot be compared: sparse ones, and uint8 ones, which are usually a library's workspace
/// and hold arbitrary old bytes.
std::uint64_t content_hash(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/forward_state.ipp>
#endif
