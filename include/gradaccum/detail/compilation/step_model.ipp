// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_model.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/autocast_mode.h>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE StepModel::StepModel(torch::nn::Module& module) {
  for (auto& item : module.named_parameters()) add(item.key(), item.value(), parameters, parameter_names);
  for (auto& item : module.named_buffers()) add(item.key(), item.value(), buffers, buffer_names);
  modules_.emplace_back("", &module);  // need not be owned by a shared_ptr
  for (auto& item : module.named_modules("", /*include_self=*/false))
    modules_.emplace_back(item.key(), item.value().get());
}

GRADACCUM_INLINE void StepModel::add(const std::string& name, const at::Tensor& tensor,
                                     std::vector<at::Tensor>& tensors, std::vector<std::string>& names) {
  if (!tensor.defined()) return;
  if (std::ranges::any_of(seen_, [&](const Seen& seen) { return seen.tensor.is_same(tensor); })) return;
  tensors.push_back(tensor);
  names.push_back(name);
  seen_.push_back({tensor, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.requires_grad()});
}

GRADACCUM_INLINE std::string StepModel::text() const {
  std::string text;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    text += parameter_names[i] + " " + layout_text(parameters[i]) +
            (parameters[i].requires_grad() ? " parameter\n" : " frozen parameter\n");
  for (std::size_t i = 0; i < buffers.size(); ++i)
    text += buffer_names[i] + " " + layout_text(buffers[i]) + " buffer\n";
  return text;
}

GRADACCUM_INLINE StepModes StepModel::modes() const {
  StepModes modes;
  modes.training.reserve(modules_.size());
  for (auto& [name, module] : modules_) modes.training.push_back(module->is_training());
  if (at::autocast::is_autocast_enabled(at::kCPU)) modes.autocast = at::autocast::get_autocast_dtype(at::kCPU);
  return modes;
}

/// Describes modes as `training but dropout; BFloat16 autocast`.
GRADACCUM_INLINE std::string StepModel::text(const StepModes& modes) const {
  std::string text = modes.training.front() ? "training" : "evaluation";
  for (std::size_t i = 1; i < modules_.size(); ++i)
    if (modes.training[i] != modes.training.front()) text += " but " + modules_[i].first;
  return text + "; " + (modes.autocast ? c10::toString(*modes.autocast) : "no") + " autocast";
}

GRADACCUM_INLINE bool StepModel::unchanged() const {
  return std::ranges::all_of(seen_, [](const Seen& seen) {
    const auto& tensor = seen.tensor;
    return tensor.is_cpu() && tensor.scalar_type() == seen.dtype && tensor.requires_grad() == seen.learned &&
           tensor.sizes() == at::IntArrayRef(seen.sizes) && tensor.strides() == at::IntArrayRef(seen.strides);
  });
}

}  // namespace gradaccum::detail
