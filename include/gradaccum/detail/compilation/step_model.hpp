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

/// What a forward pass depends on beside tensors.
struct StepModes {
  std::vector<bool> training;                   ///< of each module
  std::optional<at::ScalarType> autocast = {};  ///< none: it is off
  bool operator==(const StepModes&) const = default;
};

/// What a step reads of a model: its parameters and buffers, each tensor once.
class StepModel {
 public:
  explicit StepModel(torch::nn::Module& module);

  std::vector<at::Tensor> parameters, buffers;
  std::vector<std::string> parameter_names, buffer_names;

  /// A line for each parameter and buffer: its name, its layout, and whether it is learned.
  std::string text() const;
  StepModes modes() const;
  std::string text(const StepModes& modes) const;
  /// Whether all that `text` says holds still, as it did at construction.
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
