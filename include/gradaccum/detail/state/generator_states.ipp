// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/generator_states.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <mutex>

namespace gradaccum::detail {

GRADACCUM_INLINE std::map<std::string, at::Generator> default_generators() {
  std::map<std::string, at::Generator> all{{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (!at::globalContext().hasCUDA()) return all;
  auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex index = 0; index < cuda.getNumGPUs(); ++index) {
    const at::Device device(at::kCUDA, index);
    if (cuda.hasPrimaryContext(index)) all.emplace(device.str(), at::globalContext().defaultGenerator(device));
  }
  return all;
}

GRADACCUM_INLINE Archive::Tensors states_of_generators() {
  Archive::Tensors states;
  for (auto& [name, generator] : default_generators()) {
    const std::lock_guard lock(generator.mutex());
    states.emplace(name, generator.get_state());
  }
  return states;
}

GRADACCUM_INLINE void check_generators(const Archive::Tensors& states, bool changes_allowed) {
  auto generators = default_generators();
  TORCH_CHECK(changes_allowed || states.contains("cpu"), "RandomState: the state must have the CPU's generator");
  for (auto& [name, state] : states) {
    const auto known = generators.find(name);
    TORCH_CHECK(changes_allowed || known != generators.end(), "RandomState: the state has the generator of ", name,
                ", which this program does not use; move the model there first");
    if (known == generators.end()) continue;
    const std::lock_guard lock(known->second.mutex());
    auto probe = known->second.clone();
    probe.set_state(state.clone());
  }
}

GRADACCUM_INLINE void set_generators(const Archive::Tensors& states) {
  for (auto& [name, generator] : default_generators()) {
    const auto state = states.find(name);
    if (state == states.end()) continue;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state->second.clone());
  }
}

GRADACCUM_INLINE void archive_generators(Archive& archive) {
  auto states = archive.loading() ? Archive::Tensors() : states_of_generators();
  archive.tensors(states);
  if (!archive.loading()) return;
  check_generators(states, archive.changes_allowed());
  archive.when_all_fit([states] { set_generators(states); });
}

}  // namespace gradaccum::detail
