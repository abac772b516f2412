// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <cstddef>
#include <utility>
#include <vector>

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

/// Copies of the running statistics of normalisation layers.
inline std::vector<at::Tensor> copied_statistics(const std::vector<torch::nn::Module*>& modules) {
  std::vector<at::Tensor> copies;
  for_each_normalisation(modules, [&](auto& layer) {
    for (auto& statistics : {layer.running_mean, layer.running_var, layer.num_batches_tracked})
      copies.push_back(statistics.clone());
  });
  return copies;
}

/// Lets normalisation layers in a module move copies of their running statistics for a scope: a forward pass that is
/// only repeated must not count twice.
///
/// The layers' handles are exchanged rather than the values put back: values are saved for backward, which would take
/// the writing for a change.
class [[nodiscard]] FrozenStatistics {
 public:
  /// `start`: what the copies begin with (from `copied_statistics`), if not with what there is.
  explicit FrozenStatistics(const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& start = {})
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
  FrozenStatistics(const FrozenStatistics&) = delete;
  FrozenStatistics& operator=(const FrozenStatistics&) = delete;
  ~FrozenStatistics() {
    while (!exchanged_.empty()) {  // backwards: a layer that is part of the module twice was exchanged twice
      auto& [handle, statistics] = exchanged_.back();
      *handle = std::move(statistics);
      exchanged_.pop_back();
    }
  }

 private:
  FrozenStatistics() = default;  // if the other throws, the destructor runs all the same

  std::vector<std::pair<at::Tensor*, at::Tensor>> exchanged_;
};

}  // namespace gradaccum::detail
