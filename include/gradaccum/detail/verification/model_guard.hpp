// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Restores a model at the end of a scope: parameters, gradients, buffers, modes, and the random state of the CPU and
/// of the model's devices.
class ModelGuard {
 public:
  /// A module of the model. Its submodules follow it, up to `end`.
  struct Part {
    std::string name;
    torch::nn::Module* module;
    std::size_t end;
    bool training;
  };
  using Modes = std::vector<bool>;  ///< for each part: true in training mode

  explicit ModelGuard(torch::nn::Module& model);
  ModelGuard(const ModelGuard&) = delete;
  ModelGuard& operator=(const ModelGuard&) = delete;
  ~ModelGuard();

  const std::vector<Part>& parts() const { return parts_; }
  Modes modes() const;  ///< the original modes

  /// Restores parameters, buffers and random state, removes gradients, and sets modes.
  void rewind(const Modes& modes);
  void use_other_random_numbers();
  std::vector<at::Tensor> random_state() const;
  /// Returns whether the part's own buffers differ from what `rewind` restored.
  bool changed_buffers(const Part& part) const;

 private:
  void list(const std::string& name, torch::nn::Module& module);
  void keep(const at::Tensor& tensor);

  std::vector<Part> parts_;
  std::vector<at::Tensor> parameters_, gradients_;
  std::vector<at::Tensor> tensors_, values_;  // parameters and buffers, and their original values
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> random_state_;
};

/// The name and class of a part: `encoder.norm (BatchNorm1d)`.
std::string name_of(const ModelGuard::Part& part);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/model_guard.ipp>
#endif
