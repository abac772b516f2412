// SPDX-License-Identifier: Apache-2.0
// Keeps an exponential moving average of a model's weights.
#pragma once

#include <gradaccum/policies/ema.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/trainer_base.hpp>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

/// Averages of a model's tensors, and swapping them into it.
struct Averages {
  using Tensors = std::vector<std::pair<std::string, at::Tensor>>;  // of a model
  struct Average {
    std::string name;
    at::ScalarType dtype;  // of the model's tensor
    at::Tensor value;
  };

  std::vector<Average> averages = {};
  std::vector<at::Tensor> originals = {};  // of the model, while the averages are in it
  std::int64_t updates = 0;
  bool swapped = false;
  torch::nn::Module* attached = nullptr;

  static std::string described(const std::string& name, at::ScalarType dtype, const at::Tensor& tensor) {
    return c10::str(name, ", ", dtype, ' ', tensor.sizes(), " on ", tensor.device());
  }

  /// Returns each tensor of a model once, in the model's order.
  static Tensors distinct_tensors(torch::nn::Module& module, bool buffers) {
    Tensors all;
    std::unordered_set<const void*> seen;
    const auto add = [&](const auto& named) {
      for (auto& item : named)
        if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
          all.emplace_back(item.key(), item.value());
    };
    add(module.named_parameters());
    if (buffers) add(module.named_buffers());
    for (auto& [name, tensor] : all)
      TORCH_CHECK(tensor.layout() == at::kStrided && at::has_internal_overlap(tensor) != at::MemOverlap::Yes &&
                      !tensor._is_zerotensor() && (!tensor.is_inference() || c10::InferenceMode::is_enabled()),
                  "Ema: ", name,
                  " must be a dense tensor that can be written to, not sparse, expanded or an inference tensor");
    return all;
  }

  void check_not_swapped(const char* call) const {
    TORCH_CHECK(!swapped, "Ema: ", call, " needs the model's own weights, but it holds the averages; swap back first");
  }

  /// Returns the tensors of the model that have averages. Throws if they have changed since the averages were made.
  Tensors known_tensors(torch::nn::Module& module, bool buffers) const {
    auto tensors = distinct_tensors(module, buffers);
    const auto known = averages.size(), now = tensors.size();
    for (std::size_t i = 0; i < std::min(known, now); ++i) {
      const auto& [name, dtype, value] = averages[i];
      const auto& tensor = tensors[i].second;
      TORCH_CHECK(name == tensors[i].first && dtype == tensor.scalar_type() && value.sizes() == tensor.sizes() &&
                      value.device() == tensor.device(),
                  "Ema: the model must be as it was at the first update, with ", described(name, dtype, value),
                  ", got ", described(tensors[i].first, tensor.scalar_type(), tensor), "; make a new Ema");
    }
    TORCH_CHECK(known == now, "Ema: the model must be as it was at the first update, but ",
                known > now ? averages[now].name + " is gone" : tensors[known].first + " is new", "; make a new Ema");
    return tensors;
  }

  void update(torch::nn::Module& module, bool buffers, double decay) {
    check_not_swapped("an update");
    const bool first = updates == 0;
    const auto tensors = first ? distinct_tensors(module, buffers) : known_tensors(module, buffers);
    c10::InferenceMode outlives_any_mode(false);
    at::NoGradGuard no_grad;
    if (first) {
      std::vector<Average> copies;
      for (auto& [name, tensor] : tensors)
        copies.push_back({name, tensor.scalar_type(), tensor.detach().to(state_type(tensor), false, /*copy=*/true)});
      averages = std::move(copies);
    } else {
      move_towards(tensors, 1 - decay);
    }
    ++updates;
  }

  /// Updates consecutive averages of one device and dtype in one operation. Tensors of other dtypes are converted,
  /// which needs copies, so that their number in one operation is limited.
  void move_towards(const Tensors& tensors, double weight) const {
    std::vector<at::Tensor> targets, values;
    std::int64_t copied = 0;
    const auto move = [&] {
      if (!targets.empty()) at::_foreach_lerp_(targets, values, weight);
      targets.clear(), values.clear(), copied = 0;
    };
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& [name, dtype, average] = averages[i];
      const auto& tensor = tensors[i].second;
      if (!average.is_floating_point() && !average.is_complex()) {
        average.copy_(tensor);
        continue;
      }
      if (!targets.empty() && (targets[0].device() != average.device() || targets[0].dtype() != average.dtype()))
        move();
      targets.push_back(average);
      values.push_back(tensor.detach().to(average.scalar_type()));
      if (dtype != average.scalar_type()) copied += average.numel();
      if (copied > most_copied) move();
    }
    move();
  }

  void swap(torch::nn::Module& module, bool buffers) {
    TORCH_CHECK(updates > 0, "Ema: swap needs averages; call update(model) after a step first");
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> targets, values, own;
    for (auto& [_, tensor] : known_tensors(module, buffers)) targets.push_back(tensor);
    for (auto& average : averages) values.push_back(average.value);
    if (!swapped)
      for (auto& tensor : targets) own.push_back(tensor.detach().clone());
    if (!targets.empty()) at::_foreach_copy_(targets, swapped ? originals : values);
    originals = std::move(own);
    swapped = !swapped;
  }

  /// Checks every value before it changes any.
  void state(Archive& archive, bool buffers) {
    TORCH_CHECK(attached || !archive.loading(), "Ema: loading needs the model; call attach(model) first");
    check_not_swapped(archive.loading() ? "loading" : "saving");
    std::int64_t its_updates = archive.loading() ? 0 : updates;
    archive("updates", its_updates);
    if (!archive.loading()) {
      for (auto& [name, dtype, value] : averages) archive("average." + name, value);
      return;
    }
    c10::InferenceMode outlives_any_mode(false);
    at::NoGradGuard no_grad;
    TORCH_CHECK(its_updates >= 0, "Ema: loaded updates must be >= 0, got ", its_updates);
    std::vector<Average> loaded;
    for (auto& [name, tensor] : its_updates > 0 ? distinct_tensors(*attached, buffers) : Tensors()) {
      at::Tensor value;
      archive("average." + name, value);
      const bool fits = value.defined() && value.layout() == at::kStrided && value.sizes() == tensor.sizes() &&
                        value.scalar_type() == state_type(tensor);
      if (!fits && archive.changes_allowed()) return;  // of another model: keep the current average
      TORCH_CHECK(fits, "Ema: a loaded average must be that of ", described(name, state_type(tensor), tensor), "; got ",
                  value.defined() ? described("one", value.scalar_type(), value) : "an undefined tensor");
      loaded.push_back({name, tensor.scalar_type(), value.to(tensor.device())});
    }
    averages = std::move(loaded);
    updates = its_updates;
  }
};

}  // namespace detail

GRADACCUM_INLINE Ema::Running::Running(const Ema& given) : Ema(given), averages_(std::make_shared<detail::Averages>()) {
  decay_now();  // checks it
}

GRADACCUM_INLINE void Ema::Running::update_module(torch::nn::Module& module) {
  averages_->update(module, buffers, decay_now());
}
GRADACCUM_INLINE void Ema::Running::swap_module(torch::nn::Module& module) { averages_->swap(module, buffers); }
GRADACCUM_INLINE std::int64_t Ema::Running::updates() const { return averages_->updates; }
GRADACCUM_INLINE void Ema::Running::attach_module(torch::nn::Module& module) { averages_->attached = &module; }
GRADACCUM_INLINE void Ema::Running::after_step(const Step&) { update_module(*averages_->attached); }
GRADACCUM_INLINE void Ema::Running::state(Archive& archive) { averages_->state(archive, buffers); }

GRADACCUM_INLINE double Ema::Running::decay_now() const {
  TORCH_CHECK(decay >= 0 && decay <= 1, "Ema: decay must be in [0, 1], got ", decay);
  const auto t = static_cast<double>(updates());
  return warmup ? std::min(decay, (1 + t) / (10 + t)) : decay;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
