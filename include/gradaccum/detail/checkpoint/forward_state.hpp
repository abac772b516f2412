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
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace gradaccum::detail {

/// The state of the default random generators of the CPU and of all CUDA devices in use.
///
/// Copies the CPU's state field by field: a tensor from `Generator::get_state` would count as the model's memory.
class GeneratorStates {
 public:
  GeneratorStates();
  void restore() const;
  bool operator==(const GeneratorStates& other) const;

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
  explicit RandomScope(const GeneratorStates& state) { state.restore(); }
  RandomScope& operator=(RandomScope&&) = delete;
  ~RandomScope() { around_.restore(); }

 private:
  GeneratorStates around_;
};

/// The state, other than inputs, on which a forward pass depends: autocast, the current device and, if requested,
/// random generators.
class ForwardState {
 public:
  explicit ForwardState(bool with_random_generators);

  /// Ends the forward pass, and drops the state of random generators if it did not use them. Returns true if it did.
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
  std::unique_ptr<GeneratorStates> random_;  // 2.5 kB
};

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors);

/// Restores the state, other than gradients, that forward passes change: random generators, and a model's buffers, such
/// as BatchNorm's statistics. Holds a copy of the buffers.
class ForwardUndo {
 public:
  explicit ForwardUndo(const std::vector<at::Tensor>& buffers) : buffers_(buffers), values_(copies_of(buffers)) {}
  void put_back() const;

 private:
  std::vector<at::Tensor> buffers_, values_;
  GeneratorStates random_;
};

/// The properties that a tensor and its replacement must share.
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
/// LibTorch checks this for tensors that it saves itself, but not for tensors that hooks save.
class TensorVersion {
 public:
  TensorVersion() = default;
  explicit TensorVersion(const at::Tensor& tensor);
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }

 private:
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  std::uint32_t version_ = 0;
};

/// A buffer of a module that a forward pass may change, and its value before.
struct BufferState {
  /// Copies the value, and detects writes from now on, including writes that version counters miss (by `data()`, by
  /// kernels that update statistics, by `data_ptr()`): makes the memory copy-on-write with one owner, which LibTorch
  /// converts back, without a copy, before the first write.
  void watch();
  void note_writes();

  BufferState(at::Tensor tensor, bool of_normalisation) : buffer(std::move(tensor)), is_statistics(of_normalisation) {}

  at::Tensor buffer;
  bool is_statistics;      ///< true if results do not depend on it: for a normalisation layer in training mode
  std::size_t owners = 0;  ///< handles of the tensor before the pass, including this one
  at::Tensor before;       ///< undefined if it was not watched: a repeated pass then begins with the current value
  bool written = true;

 private:
  TensorVersion version_;
  bool marked_ = false;
};

/// The states of all buffers of modules, recursively, each once.
std::vector<std::shared_ptr<BufferState>> buffers_of(const std::vector<torch::nn::Module*>& modules);

/// Throws if a pass has replaced a buffer by another tensor. All other tensors of the pass must have been released.
void check_not_replaced(const std::vector<std::shared_ptr<BufferState>>& buffers);

/// The buffers that a checkpointed part changes in its forward pass.
struct BufferRecord {
  bool with_statistics = false;  ///< also watch statistics
  std::vector<std::shared_ptr<BufferState>> changed = {};
  std::unordered_map<const void*, bool> storages = {};  ///< storages in operations: true if an operation created it
  BufferRecord* outer = nullptr;
};

/// Makes `run_watched` add to a record and to the records of enclosing scopes, or, with nullptr, to none.
class [[nodiscard]] RecordingScope {
 public:
  explicit RecordingScope(BufferRecord* record);
  RecordingScope& operator=(RecordingScope&&) = delete;
  ~RecordingScope() { innermost_ = around_; }
  static BufferRecord* innermost() { return innermost_; }

 private:
  inline static thread_local BufferRecord* innermost_ = nullptr;

  BufferRecord* around_ = innermost_;
};

/// Returns true if a `Functional` is among the modules, recursively: its lambda may call modules outside of them.
bool calls_functions(const std::vector<torch::nn::Module*>& modules);

/// Runs a part of a forward pass, and records the buffers of `modules` that it changes, for enclosing checkpoints.
/// `calls_others`: it may call other modules, as a lambda may. Then, and if a `Functional` is among them, it also
/// records tensors that operations write to.
void run_watched(const std::vector<torch::nn::Module*>& modules, bool calls_others, c10::function_ref<void()> forward);

/// Makes forward passes of a scope begin with earlier values of the buffers, and change copies of them, so that a
/// repeated pass does not update them twice.
///
/// Exchanges the contents of the tensors together with their version counters, because autograd saves the tensors, and
/// would treat restored values as a change in place.
class [[nodiscard]] FrozenBuffers {
 public:
  explicit FrozenBuffers(const std::vector<std::shared_ptr<BufferState>>& buffers);
  FrozenBuffers& operator=(FrozenBuffers&&) = delete;
  ~FrozenBuffers();

 private:
  struct Exchanged {
    at::Tensor buffer, content;
    c10::VariableVersion version;
  };
  FrozenBuffers() = default;  // makes the destructor run even if the other constructor throws

  std::vector<Exchanged> exchanged_;
};

/// A hash of a tensor's bytes: different bytes collide with a chance of 2^-64. Synchronizes with the device.
///
/// Returns 0 for tensors that cannot be compared: sparse ones, and uint8 ones, which are usually a library's workspace
/// and hold arbitrary old bytes.
std::uint64_t content_hash(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/forward_state.ipp>
#endif
