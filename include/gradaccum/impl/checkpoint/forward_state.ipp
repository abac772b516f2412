// SPDX-License-Identifier: Apache-2.0
// Saves and restores random numbers and buffers, which a forward pass changes beside its result.
#pragma once

#include <gradaccum/detail/checkpoint/forward_state.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <ostream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::uint64_t position_of(const at::mt19937_data_pod& engine) {
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
  return position_of(engine_) == position_of(other.engine_) && engine_.state_ == other.engine_.state_ &&
         next_float_ == other.next_float_ && next_double_ == other.next_double_ &&
         std::ranges::equal(devices_, other.devices_, same_device);
}

GRADACCUM_INLINE std::uint64_t RandomState::position() {
  std::uint64_t position = 0;
  with_cpu_generator([&](at::CPUGeneratorImpl& generator) { position = position_of(generator.engine().data()); });
  return position;
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
    : cpu_(at::kCPU, state.cpu_.dtype, state.cpu_.enabled, state.autocast_caches_),
      cuda_(at::kCUDA, state.cuda_.dtype, state.cuda_.enabled, state.autocast_caches_),
      device_(state.device_) {
  if (state.random_) random_.emplace(*state.random_);
}

GRADACCUM_INLINE std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (auto& tensor : tensors) copies.push_back(tensor.defined() ? tensor.clone() : at::Tensor());
  return copies;
}

GRADACCUM_INLINE void ForwardUndo::put_back() const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (buffers_[i].defined()) buffers_[i].copy_(values_[i]);
  random_.restore();
}

/// Calls `use(layer)` for each normalisation layer in modules that has running statistics.
void for_each_normalisation(const std::vector<torch::nn::Module*>& modules, auto use) {
  const auto use_if = [&](auto* layer) {
    if (layer && layer->running_mean.defined()) use(*layer);
  };
  const auto visit = [&](torch::nn::Module& part) {
    use_if(part.as<torch::nn::BatchNorm1dImpl>());
    use_if(part.as<torch::nn::BatchNorm2dImpl>());
    use_if(part.as<torch::nn::BatchNorm3dImpl>());
    use_if(part.as<torch::nn::InstanceNorm1dImpl>());
    use_if(part.as<torch::nn::InstanceNorm2dImpl>());
    use_if(part.as<torch::nn::InstanceNorm3dImpl>());
  };
  for (auto* module : modules) module->apply(visit);
}

GRADACCUM_INLINE std::vector<at::Tensor> copied_statistics(const std::vector<torch::nn::Module*>& modules) {
  std::vector<at::Tensor> copies;
  for_each_normalisation(modules, [&](auto& layer) {
    for (auto& statistics : {layer.running_mean, layer.running_var, layer.num_batches_tracked})
      copies.push_back(statistics.clone());
  });
  return copies;
}

GRADACCUM_INLINE FrozenStatistics::FrozenStatistics(const std::vector<torch::nn::Module*>& modules,
                                                    const std::vector<at::Tensor>& start)
    : FrozenStatistics() {
  std::size_t next = 0;
  for_each_normalisation(modules, [&](auto& layer) {
    for (auto* handle : {&layer.running_mean, &layer.running_var, &layer.num_batches_tracked}) {
      const auto& values = next < start.size() ? start[next++] : *handle;
      if (!layer.is_training()) continue;
      exchanged_.emplace_back(handle, *handle);
      *handle = values.clone();
    }
  });
}

GRADACCUM_INLINE FrozenStatistics::~FrozenStatistics() {
  while (!exchanged_.empty()) {  // in reverse: a layer that is in the module twice was exchanged twice
    auto& [handle, statistics] = exchanged_.back();
    *handle = std::move(statistics);
    exchanged_.pop_back();
  }
}

GRADACCUM_INLINE TensorTraits::TensorTraits(const at::Tensor& tensor)
    : dtype_(tensor.scalar_type()), device_(tensor.device()) {
  if (tensor.layout() == at::kStrided) shape_ = tensor.sizes();  // other layouts may lack plain integer sizes
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const TensorTraits& traits) {
  return out << traits.dtype_ << ' ' << at::IntArrayRef(traits.shape_) << " on " << traits.device_;
}

GRADACCUM_INLINE TensorVersion::TensorVersion(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

GRADACCUM_INLINE std::uint64_t content_hash(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.scalar_type() == at::kByte) return 0;
  const auto bytes = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (std::size_t i = 0; i < bytes.nbytes(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<std::size_t>(8, bytes.nbytes() - i));
    hash = (hash ^ word) * 0xff51afd7ed558ccd;  // odd, so that no bits are lost
    hash ^= hash >> 33;
  }
  return hash;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
