// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/loaded_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/compilation/step_result.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace gradaccum::detail {

/// Describes the first line in which two texts differ.
GRADACCUM_INLINE std::string first_difference(const std::string& saved, const std::string& now) {
  std::istringstream saved_lines(saved), now_lines(now);
  for (;;) {
    std::string one, other;
    const bool more = static_cast<bool>(std::getline(saved_lines, one)),
               others = static_cast<bool>(std::getline(now_lines, other));
    if (one != other || !(more || others))
      return (one.empty() ? "nothing" : "'" + one + "'") + " and is " + (other.empty() ? "nothing" : "'" + other + "'");
  }
}

GRADACCUM_INLINE bool processor_has(const std::string& capability) {
#if defined(__x86_64__)
  if (capability == "AVX2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (capability == "AVX512")
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#endif
  return capability == "DEFAULT";
}

GRADACCUM_INLINE LoadedStep::LoadedStep(torch::nn::Module& module, const StepSource& source)
    : model_(module), name_(source.name()) {
  const auto libtorch = source.manifest().libtorch;
  TORCH_CHECK(libtorch == TORCH_VERSION, "CompiledStep: ", name_, ": must be of a program with LibTorch ",
              TORCH_VERSION, ", got ", libtorch, ": save and compile the step again");
  description_ = step_description(source.manifest(), name_);
  check_description();
  graphs_.reserve(description_.graphs.size());
  for (std::size_t i = 0; i < description_.graphs.size(); ++i) load(i, source);
  in_float16_ =
      description_.modes.ends_with("Half autocast") || description_.model.find(" Half [") != std::string::npos;
  if (in_float16_) seed_->value = 16;  // the loss scale that AmpScaler begins with
}

GRADACCUM_INLINE void LoadedStep::check_description() const {
  const auto now = model_.text();
  TORCH_CHECK(description_.model == now, "CompiledStep: ", name_,
              ": the model must be the one that was saved, which had ", first_difference(description_.model, now),
              ": save and compile the step again");
  for (std::size_t i = 0; i < description_.graphs.size(); ++i) {
    const auto& graph = description_.graphs[i];
    const auto what = name_ + ": " + name_of_graph(i);
    TORCH_CHECK(!graph.code.empty(), "CompiledStep: ", what, " must be compiled: tools/compile_step.py does it");
    TORCH_CHECK(processor_has(graph.capability), "CompiledStep: ", what, " is compiled for processors with ",
                graph.capability, ", which this one has not: compile it with --capability AVX2, or on this machine");
    TORCH_CHECK(graph.gradients.size() == model_.parameters.size() && graph.moved.size() == model_.buffers.size(),
                "CompiledStep: ", what, " must tell of each parameter and buffer, of which there are ",
                model_.parameters.size(), " and ", model_.buffers.size());
  }
}

GRADACCUM_INLINE void LoadedStep::load(std::size_t number, const StepSource& source) {
  const auto& description = description_.graphs[number];
  Graph graph{description, source.code(number, description), {}, {}};
  for (std::size_t i = 0; i < model_.parameters.size(); ++i)
    if (description.gradients[i] == 'y') graph.parameters.push_back(model_.parameters[i]);
  for (std::size_t i = 0; i < model_.buffers.size(); ++i)
    if (description.moved[i] == 'y') graph.moved.push_back(model_.buffers[i]);
  check_graph(graph, name_ + ": " + name_of_graph(number));
  graphs_.push_back(std::move(graph));
}

/// Checks the numbers of inputs and outputs of the code, and the index of the target.
GRADACCUM_INLINE void LoadedStep::check_graph(const Graph& graph, const std::string& name) const {
  const auto& description = graph.description;
  const auto batch = static_cast<std::size_t>(std::ranges::count(description.batch, '['));
  const auto inputs = model_.parameters.size() + model_.buffers.size() + batch + 1;
  const auto outputs = 1u + (description.output ? 1 : 0) +
                       (description.target == GraphDescription::computed_target ? 1 : 0) + graph.parameters.size();
  TORCH_CHECK(graph.code.inputs() == inputs && graph.code.outputs() == outputs, "CompiledStep: ", name, ": must take ",
              inputs, " tensors and give ", outputs, ", got ", graph.code.inputs(), " and ", graph.code.outputs());
  TORCH_CHECK(
      description.target < static_cast<std::int64_t>(batch) && description.target >= GraphDescription::no_target,
      "CompiledStep: ", name, ": the target must be one of ", batch, " tensors, got ", description.target);
}

GRADACCUM_INLINE bool LoadedStep::modes_fit(const StepModes& modes) {
  if (modes == fitting_) return true;
  if (modes == other_) return false;
  const bool fit = model_.text(modes) == description_.modes;
  (fit ? fitting_ : other_) = modes;
  return fit;
}

GRADACCUM_INLINE LoadedStep::Layout& LoadedStep::layout_of_batch(const std::vector<at::Tensor>& batch) {
  std::vector<std::int64_t> key;
  for (auto& tensor : batch) {
    key.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
    key.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.device().type()) : 0);
    key.push_back(tensor.defined() ? tensor.dim() : 0);
    if (tensor.defined()) key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  const auto [place, is_new] = layouts_.try_emplace(std::move(key));
  if (!is_new) return place->second;
  const auto find = [&](const std::string& text, std::string GraphDescription::*of) -> const Graph* {
    const auto found = std::ranges::find_if(graphs_, [&](auto& graph) { return graph.description.*of == text; });
    return found == graphs_.end() ? nullptr : &*found;
  };
  place->second.graph = find(layout_text(batch), &GraphDescription::batch);
  const auto rows = [](const at::Tensor& tensor) { return tensor.defined() && tensor.dim() > 0 ? tensor.size(0) : 0; };
  const bool as_many = std::ranges::all_of(batch, [&](auto& tensor) { return rows(tensor) == rows(batch.front()); });
  if (!place->second.graph && !batch.empty() && as_many && rows(batch.front()) > 1)
    place->second.graph = find(layout_text(batch, true), &GraphDescription::any_rows);
  return place->second;
}

GRADACCUM_INLINE Loss LoadedStep::eager(const std::string& why, c10::function_ref<Loss()> objective) {
  ++report_.eager;
  ++report_.why_eager[why];
  return objective();
}

GRADACCUM_INLINE Loss LoadedStep::run(std::vector<at::Tensor> batch, c10::function_ref<Loss()> objective) {
  if (!at::GradMode::is_enabled()) return objective();  // an evaluation, not a step
  const auto modes = model_.modes();
  if (!modes_fit(modes)) return eager("other modes: " + model_.text(modes), objective);
  if (!model_.unchanged())
    return eager("the model had " + first_difference(description_.model, model_.text()), objective);
  auto& layout = layout_of_batch(batch);
  if (!layout.graph) return eager("no graph for " + layout_text(batch), objective);
  const auto& graph = *layout.graph;
  for (auto& tensor : batch)
    if (tensor.defined()) tensor = tensor.detach().contiguous();
  if (!layout.checked) check(graph, batch, objective);
  layout.checked = true;  // if the check throws, the next batch is checked

  ComputedGradients computed{{}, seed_->value};
  if (in_float16_) computed.again = run_again(graph, batch);
  auto loss = run(graph, batch, computed.gradients, computed.exponent);
  for (auto& buffer : graph.moved) buffer.unsafeGetTensorImpl()->bump_version();
  loss.ready = set_gradients(loss.mean, graph.parameters, std::move(computed), seed_);
  ++report_.compiled;
  return loss;
}

/// Runs the code, and splits its outputs into the loss, its output and target for metrics, and gradients.
GRADACCUM_INLINE Loss LoadedStep::run(const Graph& graph, const std::vector<at::Tensor>& batch,
                                      std::vector<at::Tensor>& gradients, int exponent) const {
  auto outputs = graph.code.run(inputs_of_graph(batch, exponent));
  auto next = outputs.begin();
  const auto& description = graph.description;
  const bool of_rows = description.items == GraphDescription::items_are_rows;
  Loss loss(std::move(*next++), of_rows ? static_cast<double>(batch.front().size(0)) : description.items);
  if (description.output) loss.output = std::move(*next++);
  if (description.target == GraphDescription::computed_target) loss.target = std::move(*next++);
  if (description.target >= 0) loss.target = batch[static_cast<std::size_t>(description.target)];
  gradients.assign(std::make_move_iterator(next), std::make_move_iterator(outputs.end()));
  return loss;
}

GRADACCUM_INLINE std::vector<at::Tensor> LoadedStep::inputs_of_graph(const std::vector<at::Tensor>& batch,
                                                                     int exponent) const {
  std::vector<at::Tensor> inputs;
  inputs.reserve(model_.parameters.size() + model_.buffers.size() + batch.size() + 1);
  inputs.insert(inputs.end(), model_.parameters.begin(), model_.parameters.end());
  inputs.insert(inputs.end(), model_.buffers.begin(), model_.buffers.end());
  for (auto& tensor : batch)
    if (tensor.defined()) inputs.push_back(tensor);
  inputs.push_back(at::scalar_tensor(std::exp2(exponent), at::kFloat));
  return inputs;
}

/// Returns a function that reruns the step from the present buffers and random state, and then restores those it found.
GRADACCUM_INLINE std::function<std::vector<at::Tensor>(int)> LoadedStep::run_again(
    const Graph& graph, const std::vector<at::Tensor>& batch) const {
  const auto versions = [](const std::vector<at::Tensor>& tensors) {
    std::int64_t sum = 0;
    for (auto& tensor : tensors) sum += tensor._version();
    return sum;
  };
  return [self = shared_from_this(), &graph, batch, versions, at = versions(model_.parameters),
          before = ForwardUndo(model_.buffers)](int exponent) {
    TORCH_CHECK(versions(self->model_.parameters) == at,
                "CompiledStep: parameters must not move between a float16 loss and its backward");
    const StepTrial around(self->model_);
    before.put_back();
    std::vector<at::Tensor> gradients;
    self->run(graph, batch, gradients, exponent);
    return gradients;
  };
}

GRADACCUM_INLINE void LoadedStep::check(const Graph& graph, const std::vector<at::Tensor>& batch,
                                        c10::function_ref<Loss()> objective) const {
  const StepTrial trial(model_);
  const auto eager = trial.result(objective);
  const auto compiled = trial.result([&](std::vector<at::Tensor>& gradients) {
    std::vector<at::Tensor> computed;
    auto loss = run(graph, batch, computed, 0);
    auto next = computed.begin();
    for (const auto there : graph.description.gradients)
      gradients.push_back(there == 'y' ? std::move(*next++) : at::Tensor());
    return loss;
  });
  const auto wrong = difference_of_steps(model_, eager, compiled);
  TORCH_CHECK(wrong.empty(), "CompiledStep: ", name_, ": the compiled step must do what the objective does, but for ",
              layout_text(batch), " ", wrong, ": the objective or the model is another than when it was saved, or ",
              "depends on what is not in tensors; save and compile it again");
}

}  // namespace gradaccum::detail
