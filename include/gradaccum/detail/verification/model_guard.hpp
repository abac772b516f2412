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

/// A model for experiments. At the scope's end all is as it was: parameters, gradients, buffers, modes, and the random
/// numbers of the CPU and of the model's devices.
class ModelGuard {
 public:
  /// A module in the model. Those that are inside it follow it, up to `end`.
  struct Part {
    std::string name;
    torch::nn::Module* module;
    std::size_t end;
    bool training;
  };
  using Modes = std::vector<bool>;  ///< of each part: is it in training mode

  explicit ModelGuard(torch::nn::Module& model);
  ModelGuard(const ModelGuard&) = delete;
  ModelGuard& operator=(const ModelGuard&) = delete;
  ~ModelGuard();

  const std::vector<Part>& parts() const { return parts_; }
  Modes modes() const;  ///< as they were

  /// Parameters, buffers and random numbers as they were; no gradients.
  void rewind(const Modes& modes);
  void use_other_random_numbers();
  /// Where the random numbers are.
  std::vector<at::Tensor> random_state() const;
  /// A buffer that this part itself has is another than `rewind` left.
  bool changed_buffers(const Part& part) const;

 private:
  void list(const std::string& name, torch::nn::Module& module);
  void keep(const at::Tensor& tensor);

  std::vector<Part> parts_;
  std::vector<at::Tensor> parameters_, gradients_;
  std::vector<at::Tensor> tensors_, values_;  // parameters and buffers; what was in them
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> random_state_;
};

/// How people find it: `encoder.norm (BatchNorm1d)`.
std::string name_of(const ModelGuard::Part& part);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/model_guard.ipp>
#endif
