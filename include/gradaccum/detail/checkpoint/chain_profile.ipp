// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/chain_profile.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/gradient_source.hpp>
#include <gradaccum/detail/checkpoint/stage_profile.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <c10/util/Exception.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The cost of a stage without gradients: neither its input nor its parameters require any. It saves nothing itself.
/// Its output, which the next stage may save, counts unless the stage is the last.
GRADACCUM_INLINE StageCost without_gradients(StageCost cost, bool is_last) {
  cost.ways = {{.held = is_last ? 0 : cost.output, .forward_peak = cost.forward_peak}};
  cost.output_gradient = 0;
  return cost;
}

/// The number of owners of a tensor and of its memory.
GRADACCUM_INLINE std::size_t owners(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.defined() && tensor.has_storage(),
      "CheckpointedSequential: with a memory_budget, the input and what modules return must be dense tensors, got ",
      tensor.defined() ? c10::str("one that is ", tensor.layout()) : "an undefined one");
  return tensor.use_count() + tensor.storage().use_count();
}

GRADACCUM_INLINE Stages merged(const Stages& stages, const at::Tensor& input) {
  Stages merged;
  auto activations = input.detach().requires_grad_(input.requires_grad());
  const TensorVersion input_version(activations);
  bool output_is_kept = true, has_gradients = false;
  for (auto stage : stages) {
    if (activations.requires_grad()) activations = GradientSink::apply(activations);  // a leaf has another owner
    const auto before = owners(activations);
    const TensorVersion version(activations);
    auto output = stage.forward(0, activations);
    has_gradients |= output.requires_grad();
    const bool is_apart = output_is_kept || owners(activations) > before;
    if (merged.empty() || (is_apart && has_gradients && !version.changed()))
      merged.push_back(stage);
    else
      merged.back().append(stage);
    output_is_kept = owners(output) > 2;  // this handle and its reference to the storage
    activations = output.detach().requires_grad_(output.requires_grad());
  }
  TORCH_CHECK(!input_version.changed(),
              "CheckpointedSequential: the first module must leave its input as it is, and changes it in place; use "
              "the module without inplace");
  return merged;
}

class ChainProfile {
 public:
  ChainProfile(Stages& stages, const CheckpointOptions& options)
      : stages_(stages), options_(options), gradient_layouts_(stages.size()), has_gradients_(stages.size()) {}

  StageCosts measure(const at::Tensor& input) {
    // Repeats with the layouts of gradients that the following stages turned out to produce.
    for (int pass = 0; measure_all(input) && pass < 2; ++pass) {
    }
    if (!has_gradients_.front()) costs_.front() = without_gradients(std::move(costs_.front()), costs_.size() == 1);
    return std::move(costs_);
  }

 private:
  /// Returns whether a gradient's layout differs from the one assumed.
  bool measure_all(at::Tensor input) {
    bool surprised = false;
    costs_.clear();
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      auto profile = profile_of(stages_[i], input, gradient_layouts_[i], i + 1 == stages_.size(), options_);
      costs_.push_back(std::move(profile.cost));
      gradient_layouts_[i] = profile.gradient_layout;
      if (const auto& layout = profile.input_gradient_layout; i > 0 && layout.defined()) {
        surprised |= !same_layout(layout, gradient_layouts_[i - 1]);
        gradient_layouts_[i - 1] = layout;
      }
      input = std::move(profile.output);
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

GRADACCUM_INLINE StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options) {
  return ChainProfile(stages, options).measure(input);
}

}  // namespace gradaccum::detail
