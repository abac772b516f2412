// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/forward_state.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>

namespace gradaccum::detail {

GRADACCUM_INLINE std::uint64_t place_of(const at::mt19937_data_pod& engine) {
  return std::uint64_t{engine.state_[0]} << 32 | static_cast<std::uint32_t>(engine.left_);
}

void with_cpu_generator(auto&& use) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  use(static_cast<at::CPUGeneratorImpl&>(*generator.unsafeGetGeneratorImpl()));
}

/// Calls `use` for each CUDA device in use: requesting the generator of another would initialise that device.
void for_each_cuda_generator(auto&& use) {
  if (!at::globalContext().hasCUDA()) return;
  auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex device = 0; device < cuda.getNumGPUs(); ++device) {
    if (!cuda.hasPrimaryContext(device)) continue;
    at::Generator generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
    const std::lock_guard lock(generator.mutex());
    use(device, generator);
  }
}

GRADACCUM_INLINE RandomState::RandomState() {
  with_cpu_generator([&](at::CPUGeneratorImpl& generator) {
    engine_ = generator.engine().data();
    next_float_ = generator.next_float_normal_sample();
    next_double_ = generator.next_double_normal_sample();
  });
  for_each_cuda_generator(
      [&](c10::DeviceIndex device, at::Generator& generator) { devices_.emplace_back(device, generator.get_state()); });
}

GRADACCUM_INLINE void RandomState::restore() const {
  with_cpu_generator([&](at::CPUGeneratorImpl& generator) {
    at::mt19937 engine;
    engine.set_data(engine_);
    generator.set_engine(engine);
    generator.set_next_float_normal_sample(next_float_);
    generator.set_next_double_normal_sample(next_double_);
  });
  for_each_cuda_generator([&](c10::DeviceIndex device, at::Generator& generator) {
    for (auto& [known, state] : devices_)
      if (known == device) generator.set_state(state);
  });
}

GRADACCUM_INLINE bool RandomState::operator==(const RandomState& other) const {
  const auto same_device = [](auto& a, auto& b) { return a.first == b.first && a.second.equal(b.second); };
  return place_of(engine_) == place_of(other.engine_) && engine_.state_ == other.engine_.state_ &&
         next_float_ == other.next_float_ && next_double_ == other.next_double_ &&
         std::ranges::equal(devices_, other.devices_, same_device);
}

GRADACCUM_INLINE std::uint64_t RandomState::place() {
  std::uint64_t place = 0;
  with_cpu_generator([&](at::CPUGeneratorImpl& generator) { place = place_of(generator.engine().data()); });
  return place;
}

GRADACCUM_INLINE ForwardState::ForwardState(bool with_random_generators) {
  if (at::globalContext().hasCUDA()) device_ = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
  if (with_random_generators) random_ = std::make_unique<RandomState>();
}

GRADACCUM_INLINE bool ForwardState::finish() {
  if (random_ && *random_ == RandomState()) random_.reset();
  return random_ != nullptr;
}

GRADACCUM_INLINE ForwardState::Scope::Scope(const ForwardState& state)
    : cpu_(state.cpu_.scope(at::kCPU)), cuda_(state.cuda_.scope(at::kCUDA)), device_(state.device_) {
  if (state.random_) random_.emplace(*state.random_);
}

GRADACCUM_INLINE ForwardState::AutocastSettings::AutocastSettings(at::DeviceType device)
    : enabled(at::autocast::is_autocast_enabled(device)),
      dtype(at::autocast::get_autocast_dtype(device)),
      cached(at::autocast::is_autocast_cache_enabled()) {}

}  // namespace gradaccum::detail
