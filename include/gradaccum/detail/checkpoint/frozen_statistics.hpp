// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Lets normalisation layers in a module move copies of their running statistics for a scope: a forward pass that is
/// only repeated must not count twice.
///
/// The layers' handles are exchanged rather than the values put back: values are saved for backward, which would take
/// the writing for a change.
class [[nodiscard]] FrozenStatistics {
 public:
  explicit FrozenStatistics(const std::vector<torch::nn::Module*>& modules) : FrozenStatistics() {
    for (auto* module : modules)
      module->apply([this](torch::nn::Module& part) {
        exchange_if<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl,
                    torch::nn::InstanceNorm1dImpl, torch::nn::InstanceNorm2dImpl, torch::nn::InstanceNorm3dImpl>(part);
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

  template <class... Layers>
  void exchange_if(torch::nn::Module& part) {
    (exchange_in(dynamic_cast<Layers*>(&part)), ...);
  }
  template <class Layer>
  void exchange_in(Layer* layer) {
    if (!layer || !layer->is_training()) return;
    for (auto* handle : {&layer->running_mean, &layer->running_var, &layer->num_batches_tracked}) {
      if (!handle->defined()) continue;
      auto copy = handle->clone();
      exchanged_.emplace_back(handle, std::exchange(*handle, std::move(copy)));
    }
  }

  std::vector<std::pair<at::Tensor*, at::Tensor>> exchanged_;
};

}  // namespace gradaccum::detail
