// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/compilation/step_source.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The exponent of the seed (a loss scale or a weight) that the next backward pass is expected to have: the last one's.
struct SeedExponent {
  int value = 0;

  /// Sets the exponent to that of `seed`: 5 for 32, and for 60. Ignores 0 and numbers that are not finite.
  void follow(double seed);
};

/// Gradients computed with the loss, and a function that recomputes them.
struct ComputedGradients {
  std::vector<at::Tensor> gradients;  ///< in the order of the parameters
  int exponent = 0;                   ///< exponent of the seed they were computed with
  /// Recomputes them with another exponent. Empty if nothing underflows: a factor of a power of two is then as good.
  std::function<std::vector<at::Tensor>(int exponent)> again = {};
};

/// Makes the backward of `loss` add these gradients to the parameters. The returned object does it without autograd.
std::shared_ptr<ReadyGradients> set_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters,
                                              ComputedGradients computed, std::shared_ptr<SeedExponent> next);

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

namespace gradaccum::detail {

/// The results of one forward and backward pass.
struct TrialResult {
  Loss loss;
  std::vector<at::Tensor> gradients;  ///< one per parameter; undefined if the loss does not depend on it
  std::vector<at::Tensor> buffers;
  RandomState random;
};

/// Runs passes over one batch, each from the same buffers and random state, and restores these at the end.
class StepTrial {
 public:
  explicit StepTrial(const StepModel& model) : model_(model), begin_(model.buffers) {}
  StepTrial(const StepTrial&) = delete;
  StepTrial& operator=(const StepTrial&) = delete;
  ~StepTrial() { begin_.put_back(); }

  /// Runs one pass. Autograd computes the gradients, unless `run` stores them itself.
  TrialResult result(c10::function_ref<Loss()> run) const;
  TrialResult result(c10::function_ref<Loss(std::vector<at::Tensor>& gradients)> run) const;

 private:
  const StepModel& model_;
  ForwardUndo begin_;
};

/// Describes the first difference beyond the rounding of the dtypes used, as `the gradient of fc.weight differs by 1.0
/// of its norm`. Empty if there is none.
std::string difference_of_steps(const StepModel& model, const TrialResult& wanted, const TrialResult& got);

/// A batch and its objective.
struct StepCall {
  std::vector<at::Tensor> batch;
  std::function<Loss()> objective;
  bool tensors_alone = true;  ///< false: the batch may hold numbers, which tracing does not see
};

/// A forward pass as TorchScript: a function of parameters, buffers and the batch's tensors, in this order. It returns
/// the loss, and its output and target if it has them.
struct StepTrace {
  std::string script;       ///< contents of a TorchScript file
  std::string operations;   ///< the graph as text without shapes, to compare constants of two traces
  Loss loss{at::Tensor()};  ///< values of the traced run
};

/// Runs the objective once, and records its operations.
///
/// Throws `c10::Error` if the objective reads a value on the host, which would become a constant. Throws, too, if it
/// uses a tensor that belongs neither to the model nor to the batch, unless `constants` allows that.
StepTrace trace_of(const StepModel& model, const StepCall& call, bool constants);

/// Runs the script by operations that autograd can follow.
Loss replayed(const std::string& script, const StepModel& model, const std::vector<at::Tensor>& batch,
              const Loss& traced);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/compilation/loaded_step.ipp>
#endif
