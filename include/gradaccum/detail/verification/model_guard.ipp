// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/model_guard.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>

namespace gradaccum::detail {

GRADACCUM_INLINE ModelGuard::ModelGuard(torch::nn::Module& model) : parameters_(model.parameters()) {
  at::NoGradGuard no_grad;
  list("", model);
  for (auto& parameter : parameters_) keep(parameter);
  for (auto& buffer : model.buffers()) keep(buffer);
  std::vector<at::Device> devices{at::kCPU};
  for (auto& tensor : tensors_)
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) devices.push_back(tensor.device());
  for (auto device : devices) generators_.push_back(at::globalContext().defaultGenerator(device));
  random_state_ = random_state();
  for (auto& parameter : parameters_) gradients_.push_back(parameter.grad());
}

GRADACCUM_INLINE ModelGuard::~ModelGuard() {
  try {
    rewind(modes());
    for (std::size_t i = 0; i < gradients_.size(); ++i) parameters_[i].mutable_grad() = gradients_[i];
  } catch (...) {  // from a user's train(), or a lost device; a destructor must not throw
  }
}

GRADACCUM_INLINE void ModelGuard::keep(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  tensors_.push_back(tensor);
  values_.push_back(tensor.detach().clone());
}

/// Lists a module and its submodules. `named_modules` does not work for a model on the stack, without a shared_ptr.
GRADACCUM_INLINE void ModelGuard::list(const std::string& name, torch::nn::Module& module) {
  const auto i = parts_.size();
  parts_.push_back({name, &module, 0, module.is_training()});
  for (auto& child : module.named_children())
    list(name.empty() ? child.key() : name + '.' + child.key(), *child.value());
  parts_[i].end = parts_.size();
}

GRADACCUM_INLINE ModelGuard::Modes ModelGuard::modes() const {
  Modes modes;
  for (auto& part : parts_) modes.push_back(part.training);
  return modes;
}

GRADACCUM_INLINE void ModelGuard::rewind(const Modes& modes) {
  at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  for (std::size_t i = 0; i < tensors_.size(); ++i)  // by value: BatchNorm bypasses version counters
    if (!tensors_[i].equal(values_[i])) tensors_[i].copy_(values_[i]);
  for (std::size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard lock(generators_[i].mutex());
    generators_[i].set_state(random_state_[i]);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i)  // parents come first, and set their children
    if (parts_[i].module->is_training() != modes[i]) parts_[i].module->train(modes[i]);
}

GRADACCUM_INLINE void ModelGuard::use_other_random_numbers() {
  for (auto& generator : generators_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + 1);
  }
}

GRADACCUM_INLINE std::vector<at::Tensor> ModelGuard::random_state() const {
  std::vector<at::Tensor> states;
  for (auto generator : generators_) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

GRADACCUM_INLINE bool ModelGuard::changed_buffers(const Part& part) const {
  for (auto& buffer : part.module->buffers(/*recurse=*/false))
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (tensors_[i].is_same(buffer) && !buffer.equal(values_[i])) return true;
  return false;
}

GRADACCUM_INLINE std::string name_of(const ModelGuard::Part& part) {
  auto type = type_name(*part.module);
  if (type.ends_with("Impl")) type.resize(type.size() - 4);
  return (part.name.empty() ? "the model itself" : part.name) + " (" + type + ")";
}

}  // namespace gradaccum::detail
