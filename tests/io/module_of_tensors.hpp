// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>

namespace testing {

using Tensors = std::map<std::string, at::Tensor>;

/// A module with these parameters, in submodules according to the dots in their names.
struct ModuleOfTensors : torch::nn::Module {
  ModuleOfTensors() = default;
  explicit ModuleOfTensors(const Tensors& tensors) {
    for (auto& [name, tensor] : tensors) add(name, tensor);
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto dot = name.find('.');
    if (dot == name.npos) {
      register_parameter(name, tensor, false);
      return;
    }
    const auto first = name.substr(0, dot);
    if (!named_children().contains(first)) register_module(first, std::make_shared<ModuleOfTensors>());
    named_children()[first]->as<ModuleOfTensors>()->add(name.substr(dot + 1), tensor);
  }

  at::Tensor at(const std::string& name) const { return named_parameters()[name]; }
};

inline ModuleOfTensors zeros_like(const Tensors& tensors) {
  ModuleOfTensors module;
  for (auto& [name, tensor] : tensors) module.add(name, torch::zeros_like(tensor));
  return module;
}

inline Tensors copies_of(const torch::nn::Module& module) {
  Tensors copies;
  for (auto& item : module.named_parameters()) copies[item.key()] = item.value().detach().clone();
  for (auto& item : module.named_buffers()) copies[item.key()] = item.value().clone();
  return copies;
}

inline bool equal(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](auto& x, auto& y) { return x.first == y.first && x.second.equal(y.second); });
}

}  // namespace testing
