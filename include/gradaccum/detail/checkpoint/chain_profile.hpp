// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/gradient_source.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>
#include <gradaccum/detail/checkpoint/stage.hpp>
#include <gradaccum/detail/checkpoint/stage_profile.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A stage without gradients, because neither its input nor any parameter up to it has any, keeps nothing, but its
/// input is there while it runs; and its output is the next one's to pay for, if that has gradients.
inline StageCost without_gradients(StageCost cost, std::int64_t input, bool next_has_gradients) {
  auto& way = cost.ways.front();
  way = {.held = next_has_gradients ? cost.output : 0, .forward_peak = input + cost.forward_peak};
  cost.ways.resize(1);
  cost.output_gradient = 0;
  return cost;
}

/// How many hold on to a tensor or its memory.
inline std::size_t owners(const at::Tensor& tensor) { return tensor.use_count() + tensor.storage().use_count(); }

/// Merges a stage into the one before, if that does not keep the output and this one does not need it: a layer of
/// weights and the dropout behind it. Apart, that output would have to be counted while it is long gone.
inline Stages merged(const Stages& stages, at::Tensor activations) {
  Stages merged;
  bool output_is_kept = true;
  for (auto stage : stages) {
    if (activations.requires_grad()) activations = GradientSink::apply(activations);  // the graph owns leaves
    const auto before = owners(activations);
    auto output = stage.forward(0, activations);
    if (output_is_kept || owners(activations) > before)
      merged.push_back(stage);
    else
      merged.back().append(stage);
    output_is_kept = owners(output) > 2;  // this handle, and its memory's
    const bool has_gradients = output.requires_grad();
    activations = output.detach().requires_grad_(has_gradients);
  }
  return merged;
}

/// What each stage of a chain costs, for inputs like this one. Runs each of them a few times, and leaves no trace:
/// random generators and running statistics stay where they are, and no gradient of a parameter changes.
class ChainProfile {
 public:
  ChainProfile(Stages& stages, const CheckpointOptions& options)
      : stages_(stages), options_(options), gradient_layouts_(stages.size()), has_gradients_(stages.size()) {}

  StageCosts measure(const at::Tensor& input) {
    // A stage is told the layout of the gradient that the next one makes, as it is known by then.
    for (int pass = 0; measure_all(input) && pass < 2; ++pass) {
    }
    for (std::size_t i = 0; i < costs_.size() && !has_gradients_[i]; ++i)
      costs_[i] = without_gradients(std::move(costs_[i]), i > 0 ? costs_[i - 1].output : 0,
                                    i + 1 < costs_.size() && has_gradients_[i + 1]);
    return std::move(costs_);
  }

 private:
  /// Returns whether a layout turned out to be another than was thought.
  bool measure_all(at::Tensor input) {
    bool surprised = false;
    costs_.clear();
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      StageProfile profile(stages_[i], input, gradient_layouts_[i], i + 1 == stages_.size(), options_);
      costs_.push_back(profile.measure());
      gradient_layouts_[i] = profile.gradient_layout();
      if (const auto& layout = profile.input_gradient_layout(); i > 0 && layout.defined()) {
        surprised |= !same_layout(layout, gradient_layouts_[i - 1]);
        gradient_layouts_[i - 1] = layout;
      }
      input = profile.output();
      has_gradients_[i] = input.requires_grad();
    }
    return surprised;
  }

  Stages& stages_;
  CheckpointOptions options_;
  std::vector<at::Tensor> gradient_layouts_;
  std::vector<bool> has_gradients_;
  StageCosts costs_;
};

}  // namespace gradaccum::detail
