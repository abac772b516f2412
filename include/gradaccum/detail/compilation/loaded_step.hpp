// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_backward.hpp>
#include <gradaccum/detail/compilation/step_code.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/compilation/step_model.hpp>
#include <gradaccum/detail/compilation/step_source.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum {

/// The numbers of steps that a `CompiledStep` ran compiled and eagerly, with reasons. Printable.
struct CompiledStepReport {
  std::int64_t compiled = 0, eager = 0;
  std::map<std::string, std::int64_t> why_eager = {};  ///< counts by reason
};

namespace detail {

/// A compiled step of one model. Finds the graph for a batch, checks it on the first batch of a layout, and runs it.
class LoadedStep : public std::enable_shared_from_this<LoadedStep> {
 public:
  LoadedStep(torch::nn::Module& module, const StepSource& source);

  /// Computes the loss of a batch and its gradients; runs `objective` if there is no graph for it.
  Loss run(std::vector<at::Tensor> batch, c10::function_ref<Loss()> objective);

  const CompiledStepReport& report() const { return report_; }

 private:
  struct Graph {
    GraphDescription description;
    StepCode code;
    std::vector<at::Tensor> parameters;  // parameters with a gradient
    std::vector<at::Tensor> moved;       // buffers that the step changes
  };
  /// A batch layout seen before.
  struct Layout {
    const Graph* graph = nullptr;
    bool checked = false;
  };

  void check_description() const;
  void load(std::size_t number, const StepSource& source);
  void check_graph(const Graph& graph, const std::string& name) const;
  bool modes_fit(const StepModes& modes);
  Layout& layout_of_batch(const std::vector<at::Tensor>& batch);
  Loss eager(const std::string& why, c10::function_ref<Loss()> objective);
  void check(const Graph& graph, const std::vector<at::Tensor>& batch, c10::function_ref<Loss()> objective) const;
  Loss run(const Graph& graph, const std::vector<at::Tensor>& batch, std::vector<at::Tensor>& gradients,
           int exponent) const;
  std::vector<at::Tensor> inputs_of_graph(const std::vector<at::Tensor>& batch, int exponent) const;
  std::function<std::vector<at::Tensor>(int)> run_again(const Graph& graph, const std::vector<at::Tensor>& batch) const;

  StepModel model_;
  std::string name_;
  StepDescription description_;
  std::vector<Graph> graphs_;
  std::map<std::vector<std::int64_t>, Layout> layouts_;
  std::optional<StepModes> fitting_, other_;  // the last modes compared
  bool in_float16_ = false;
  std::shared_ptr<SeedExponent> seed_ = std::make_shared<SeedExponent>();
  CompiledStepReport report_;
};

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/loaded_step.ipp>
#endif
