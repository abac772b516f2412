// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/averages.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <unordered_set>
#include <utility>

namespace gradaccum::detail {

/// A tensor of a model.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

GRADACCUM_INLINE std::string described(const std::string& name, at::ScalarType dtype, const at::Tensor& tensor) {
  return c10::str(name, ", ", dtype, ' ', tensor.sizes(), " on ", tensor.device());
}

/// Each tensor of a model once, in the model's order.
GRADACCUM_INLINE std::vector<NamedTensor> distinct_tensors(torch::nn::Module& module, bool buffers) {
  std::vector<NamedTensor> all;
  std::unordered_set<const void*> seen;
  const auto add = [&](const auto& named) {
    for (auto& item : named)
      if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
        all.push_back({item.key(), item.value()});
  };
  add(module.named_parameters());
  if (buffers) add(module.named_buffers());
  for (auto& [name, tensor] : all)
    TORCH_CHECK(tensor.layout() == at::kStrided && at::has_internal_overlap(tensor) != at::MemOverlap::Yes &&
                    !tensor._is_zerotensor() && (!tensor.is_inference() || c10::InferenceMode::is_enabled()),
                "Ema: ", name, " must be a dense tensor that can be written to, not sparse, expanded or an inference ",
                "tensor");
  return all;
}

GRADACCUM_INLINE void Averages::check_not_swapped(const char* call) const {
  TORCH_CHECK(!swapped_, "Ema: ", call, " needs the model's own weights, but the averages are in it; swap first");
}

/// The tensors of the model that the averages are of; throws if it has changed.
GRADACCUM_INLINE std::vector<NamedTensor> Averages::known_tensors(torch::nn::Module& module, bool buffers) const {
  auto tensors = distinct_tensors(module, buffers);
  const auto known = averages_.size(), now = tensors.size();
  for (std::size_t i = 0; i < std::min(known, now); ++i) {
    const auto& [name, dtype, value] = averages_[i];
    const auto& tensor = tensors[i].tensor;
    TORCH_CHECK(name == tensors[i].name && dtype == tensor.scalar_type() && value.sizes() == tensor.sizes() &&
                    value.device() == tensor.device(),
                "Ema: the model must be as it was at the first update, with ", described(name, dtype, value), ", got ",
                described(tensors[i].name, tensor.scalar_type(), tensor), "; make a new Ema");
  }
  TORCH_CHECK(known == now, "Ema: the model must be as it was at the first update, but ",
              known > now ? averages_[now].name + " is gone" : tensors[known].name + " is new", "; make a new Ema");
  return tensors;
}

GRADACCUM_INLINE void Averages::update(torch::nn::Module& module, bool buffers, double decay) {
  check_not_swapped("an update");
  const bool first = updates_ == 0;
  const auto tensors = first ? distinct_tensors(module, buffers) : known_tensors(module, buffers);
  c10::InferenceMode outlives_any_mode(false);
  at::NoGradGuard no_grad;
  if (first) {
    std::vector<Average> copies;
    for (auto& [name, tensor] : tensors)
      copies.push_back({name, tensor.scalar_type(), tensor.detach().to(state_type(tensor), false, /*copy=*/true)});
    averages_ = std::move(copies);
  } else {
    move_towards(tensors, 1 - decay);
  }
  ++updates_;
}

/// One operation for tensors in a row that are of one device and dtype. 16-bit ones are copied, so some at a time.
GRADACCUM_INLINE void Averages::move_towards(const std::vector<NamedTensor>& tensors, double weight) const {
  std::vector<at::Tensor> averages, values;
  std::int64_t copied = 0;
  const auto move = [&] {
    if (!averages.empty()) at::_foreach_lerp_(averages, values, weight);
    averages.clear(), values.clear(), copied = 0;
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, dtype, average] = averages_[i];
    const auto& tensor = tensors[i].tensor;
    if (!average.is_floating_point() && !average.is_complex()) {
      average.copy_(tensor);
      continue;
    }
    if (!averages.empty() && (averages[0].device() != average.device() || averages[0].dtype() != average.dtype()))
      move();
    averages.push_back(average);
    values.push_back(tensor.detach().to(average.scalar_type()));
    if (dtype != average.scalar_type()) copied += average.numel();
    if (copied > most_copied) move();
  }
  move();
}

GRADACCUM_INLINE void Averages::swap(torch::nn::Module& module, bool buffers) {
  TORCH_CHECK(updates_ > 0, "Ema: swap needs averages; call update(model) after an update first");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> targets, averages, originals;
  for (auto& [_, tensor] : known_tensors(module, buffers)) targets.push_back(tensor);
  for (auto& average : averages_) averages.push_back(average.value);
  if (!swapped_)
    for (auto& tensor : targets) originals.push_back(tensor.detach().clone());
  if (!targets.empty()) at::_foreach_copy_(targets, swapped_ ? originals_ : averages);
  originals_ = std::move(originals);
  swapped_ = !swapped_;
}

GRADACCUM_INLINE void Averages::save(Archive& archive) {
  check_not_swapped("saving");
  archive("updates", updates_);
  for (auto& [name, dtype, value] : averages_) archive("average." + name, value);
}

/// Checks all before it changes anything.
GRADACCUM_INLINE void Averages::load(Archive& archive, torch::nn::Module& module, bool buffers) {
  check_not_swapped("loading");
  c10::InferenceMode outlives_any_mode(false);
  at::NoGradGuard no_grad;
  std::int64_t updates = 0;
  archive("updates", updates);
  TORCH_CHECK(updates >= 0, "Ema: loaded updates must be >= 0, got ", updates);
  std::vector<Average> loaded;
  for (auto& [name, tensor] : updates > 0 ? distinct_tensors(module, buffers) : std::vector<NamedTensor>()) {
    at::Tensor value;
    archive("average." + name, value);
    const bool fits = value.defined() && value.layout() == at::kStrided && value.sizes() == tensor.sizes() &&
                      value.scalar_type() == state_type(tensor);
    if (!fits && archive.changes_allowed()) return;  // another model's: those of this one stay as they are
    TORCH_CHECK(fits, "Ema: a loaded average must be that of ", described(name, state_type(tensor), tensor), "; got ",
                value.defined() ? described("one", value.scalar_type(), value) : "an undefined tensor");
    loaded.push_back({name, tensor.scalar_type(), value.to(tensor.device())});
  }
  averages_ = std::move(loaded);
  updates_ = updates;
}

}  // namespace gradaccum::detail
