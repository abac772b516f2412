// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <cstddef>

namespace gradaccum::detail {

/// Calls `use(layer)` for each normalisation layer in modules that has running statistics.
template <class... Layers, class Use>
void for_each_of(const std::vector<torch::nn::Module*>& modules, Use& use) {
  const auto use_if = [&](auto* layer) {
    if (layer && layer->running_mean.defined()) use(*layer);
  };
  for (auto* module : modules)
    module->apply([&](torch::nn::Module& part) { (use_if(dynamic_cast<Layers*>(&part)), ...); });
}
void for_each_normalisation(const std::vector<torch::nn::Module*>& modules, auto use) {
  for_each_of<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl,
              torch::nn::InstanceNorm1dImpl, torch::nn::InstanceNorm2dImpl, torch::nn::InstanceNorm3dImpl>(modules,
                                                                                                           use);
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

}  // namespace gradaccum::detail
