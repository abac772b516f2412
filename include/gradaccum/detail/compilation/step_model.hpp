// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/layout_text.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The modes on which a forward pass depends besides tensors.
struct StepModes {
  std::vector<bool> training;                   ///< one flag per module
  std::optional<at::ScalarType> autocast = {};  ///< nullopt: autocast is off
  bool operator==(const StepModes&) const = default;
};

/// The parameters and buffers of a model, each tensor once.
class StepModel {
 public:
  explicit StepModel(torch::nn::Module& module);

  std::vector<at::Tensor> parameters, buffers;
  std::vector<std::string> parameter_names, buffer_names;

  /// Returns a line for each parameter and buffer: its name, its layout, and whether it is trainable.
  std::string text() const;
  StepModes modes() const;
  std::string text(const StepModes& modes) const;
  /// Returns whether all that `text` lists is as it was at construction, with all tensors on the CPU.
  bool unchanged() const;

 private:
  struct Seen {
    at::Tensor tensor;
    std::vector<std::int64_t> sizes, strides;
    at::ScalarType dtype;
    bool learned;
  };
  void add(const std::string& name, const at::Tensor& tensor, std::vector<at::Tensor>& tensors,
           std::vector<std::string>& names);

  std::vector<std::pair<std::string, torch::nn::Module*>> modules_;
  std::vector<Seen> seen_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_model.ipp>
#endif
