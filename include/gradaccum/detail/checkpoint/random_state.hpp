// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Where the default random generators of the CPU and of all CUDA devices in use stand.
///
/// The CPU's is copied by its parts: `Generator::get_state` would make a tensor, and count as memory of the model.
class RandomState {
 public:
  RandomState() {
    with_cpu([&](at::CPUGeneratorImpl& generator) {
      engine_ = generator.engine().data();
      next_float_ = generator.next_float_normal_sample();
      next_double_ = generator.next_double_normal_sample();
    });
    for_each_device([&](c10::DeviceIndex device, at::Generator& generator) {
      devices_.emplace_back(device, generator.get_state());
    });
  }

  void restore() const {
    with_cpu([&](at::CPUGeneratorImpl& generator) {
      at::mt19937 engine;
      engine.set_data(engine_);
      generator.set_engine(engine);
      generator.set_next_float_normal_sample(next_float_);
      generator.set_next_double_normal_sample(next_double_);
    });
    for_each_device([&](c10::DeviceIndex device, at::Generator& generator) {
      for (auto& [known, state] : devices_)
        if (known == device) generator.set_state(state);
    });
  }

  bool operator==(const RandomState& other) const {
    const auto same_device = [](auto& a, auto& b) { return a.first == b.first && a.second.equal(b.second); };
    return place_of(engine_) == place_of(other.engine_) && engine_.state_ == other.engine_.state_ &&
           next_float_ == other.next_float_ && next_double_ == other.next_double_ &&
           std::ranges::equal(devices_, other.devices_, same_device);
  }

  /// A number that tells places in the CPU's stream of random numbers apart; cheaper than the state.
  static std::uint64_t place() {
    std::uint64_t place = 0;
    with_cpu([&](at::CPUGeneratorImpl& generator) { place = place_of(generator.engine().data()); });
    return place;
  }

 private:
  static std::uint64_t place_of(const at::mt19937_data_pod& engine) {
    return std::uint64_t{engine.state_[0]} << 32 | static_cast<std::uint32_t>(engine.left_);
  }
  static void with_cpu(auto&& use) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    use(static_cast<at::CPUGeneratorImpl&>(*generator.unsafeGetGeneratorImpl()));
  }
  /// Asking for the generator of a device that nobody has used yet would start the device.
  static void for_each_device(auto&& use) {
    if (!at::globalContext().hasCUDA()) return;
    auto& cuda = at::detail::getCUDAHooks();
    for (c10::DeviceIndex device = 0; device < cuda.getNumGPUs(); ++device) {
      if (!cuda.hasPrimaryContext(device)) continue;
      at::Generator generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
      const std::lock_guard lock(generator.mutex());
      use(device, generator);
    }
  }

  at::mt19937_data_pod engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
  std::vector<std::pair<c10::DeviceIndex, at::Tensor>> devices_;
};

/// Goes back to a state for a scope.
class [[nodiscard]] RandomScope {
 public:
  explicit RandomScope(const RandomState& state) { state.restore(); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;
  ~RandomScope() { around_.restore(); }

 private:
  RandomState around_;
};

}  // namespace gradaccum::detail
