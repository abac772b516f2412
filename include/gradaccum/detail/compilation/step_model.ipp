// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_model.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string layout_text_of(const at::Tensor& tensor, bool any_rows) {
  if (!tensor.defined()) return "none";
  std::string sizes;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    sizes += (i ? ", " : "") + (any_rows && i == 0 ? "*" : std::to_string(tensor.size(i)));
  auto text = std::string(c10::toString(tensor.scalar_type())) + " [" + sizes + "]";
  if (!tensor.is_cpu()) text += " on " + tensor.device().str();
  return text;
}

GRADACCUM_INLINE std::string layout_text(const at::Tensor& tensor) {
  auto text = layout_text_of(tensor, false);
  if (!tensor.defined() || tensor.is_contiguous()) return text;
  text += " strides";
  for (const auto stride : tensor.strides()) text += " " + std::to_string(stride);
  return text;
}

/// Of a batch, whose tensors are made contiguous where they are not.
GRADACCUM_INLINE std::string layout_text(const std::vector<at::Tensor>& tensors, bool any_rows) {
  std::string text;
  for (auto& tensor : tensors) text += (text.empty() ? "" : ", ") + layout_text_of(tensor, any_rows);
  return text;
}

GRADACCUM_INLINE StepModel::StepModel(torch::nn::Module& module) {
  for (auto& item : module.named_parameters()) add(item.key(), item.value(), parameters, parameter_names);
  for (auto& item : module.named_buffers()) add(item.key(), item.value(), buffers, buffer_names);
  modules_.emplace_back("", &module);  // which need not be owned by a shared_ptr
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

/// `training but dropout; BFloat16 autocast`
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

GRADACCUM_INLINE std::vector<at::Tensor> StepModel::copied_buffers() const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (auto& buffer : buffers) copies.push_back(buffer.clone());
  return copies;
}

GRADACCUM_INLINE void StepModel::put_back(const std::vector<at::Tensor>& values) const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(values[i]);
}

}  // namespace gradaccum::detail
