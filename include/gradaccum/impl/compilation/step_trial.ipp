// SPDX-License-Identifier: Apache-2.0
// Runs steps of a model on trial, and compares their results: for steps that take an objective's place.
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

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
  explicit StepModel(torch::nn::Module& module) {
    for (auto& item : module.named_parameters()) add_parameter(item.key(), item.value());
    for (auto& item : module.named_buffers()) add_buffer(item.key(), item.value());
    modules_.emplace_back("", &module);  // need not be owned by a shared_ptr
    for (auto& item : module.named_modules("", /*include_self=*/false))
      modules_.emplace_back(item.key(), item.value().get());
  }
  StepModel() = default;

  void add_parameter(const std::string& name, const at::Tensor& tensor) {
    add(name, tensor, parameters, parameter_names);
  }
  void add_buffer(const std::string& name, const at::Tensor& tensor) { add(name, tensor, buffers, buffer_names); }

  std::vector<at::Tensor> parameters, buffers;
  std::vector<std::string> parameter_names, buffer_names;

  std::vector<at::Tensor> trained() const {
    auto trained = parameters;
    std::erase_if(trained, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
    return trained;
  }

  /// Returns a line for each parameter and buffer: its name, its layout, and whether it is trainable.
  std::string text() const {
    std::string text;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      text += parameter_names[i] + " " + layout_text(parameters[i]) +
              (parameters[i].requires_grad() ? " parameter\n" : " frozen parameter\n");
    for (std::size_t i = 0; i < buffers.size(); ++i)
      text += buffer_names[i] + " " + layout_text(buffers[i]) + " buffer\n";
    return text;
  }

  /// Returns whether there is a module of LibTorch's that compares query, key and value.
  bool attends() const {
    return std::ranges::any_of(
        modules_, [](auto& item) { return item.second->name().starts_with("torch::nn::MultiheadAttention"); });
  }

  StepModes modes() const {
    StepModes modes;
    modes.training.reserve(modules_.size());
    for (auto& [name, module] : modules_) modes.training.push_back(module->is_training());
    const auto device = parameters.empty() ? at::kCPU : parameters.front().device().type();
    if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device))
      modes.autocast = at::autocast::get_autocast_dtype(device);
    return modes;
  }

  /// Describes modes as `training but dropout; BFloat16 autocast`.
  std::string text(const StepModes& modes) const {
    std::string text = modes.training.front() ? "training" : "evaluation";
    for (std::size_t i = 1; i < modules_.size(); ++i)
      if (modes.training[i] != modes.training.front()) text += " but " + modules_[i].first;
    return text + "; " + (modes.autocast ? c10::toString(*modes.autocast) : "no") + " autocast";
  }

  /// Returns whether all that `text` lists is as it was at construction, with all tensors on the CPU. `may_be_frozen`:
  /// a parameter need not be trainable any more.
  bool unchanged(bool may_be_frozen = false) const {
    return std::ranges::all_of(seen_, [may_be_frozen](const Seen& seen) {
      const auto& tensor = seen.tensor;
      return tensor.is_cpu() && tensor.scalar_type() == seen.dtype &&
             (tensor.requires_grad() == seen.trainable || (may_be_frozen && seen.trainable)) &&
             tensor.sizes() == at::IntArrayRef(seen.sizes) && tensor.strides() == at::IntArrayRef(seen.strides);
    });
  }

 private:
  struct Seen {
    at::Tensor tensor;
    std::vector<std::int64_t> sizes, strides;
    at::ScalarType dtype;
    bool trainable;
  };

  void add(const std::string& name, const at::Tensor& tensor, std::vector<at::Tensor>& tensors,
           std::vector<std::string>& names) {
    if (!tensor.defined()) return;
    if (std::ranges::any_of(seen_, [&](const Seen& seen) { return seen.tensor.is_same(tensor); })) return;
    tensors.push_back(tensor);
    names.push_back(name);
    seen_.push_back(
        {tensor, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.requires_grad()});
  }

  std::vector<std::pair<std::string, torch::nn::Module*>> modules_;
  std::vector<Seen> seen_;
};

/// Returns the model's tensors and the batch's, as code and scripts receive them.
GRADACCUM_INLINE std::vector<at::Tensor> inputs_of(const StepModel& model, const std::vector<at::Tensor>& batch) {
  std::vector<at::Tensor> inputs;
  inputs.reserve(model.parameters.size() + model.buffers.size() + batch.size() + 1);
  for (const auto* const tensors : {&model.parameters, &model.buffers, &batch})
    for (auto& tensor : *tensors)
      if (tensor.defined()) inputs.push_back(tensor);
  return inputs;
}

/// Calls `visit` for each node of a loss's graph once.
GRADACCUM_INLINE void for_each_node(const at::Tensor& loss, c10::function_ref<void(torch::autograd::Node&)> visit) {
  std::vector<torch::autograd::Node*> next;
  if (const auto& node = loss.grad_fn()) next.push_back(node.get());  // a parameter has none
  std::unordered_set<torch::autograd::Node*> seen(next.begin(), next.end());
  while (!next.empty()) {
    auto* const node = next.back();
    next.pop_back();
    visit(*node);
    for (auto& edge : node->next_edges())
      if (edge.is_valid() && seen.insert(edge.function.get()).second) next.push_back(edge.function.get());
  }
}

/// Returns the tolerance for a sum of products, relative to its norm: several thousand roundings of the coarsest dtype
/// that the model has, or that a loss was computed in.
GRADACCUM_INLINE double tolerance_of(const StepModel& model, const at::Tensor& loss) {
  auto bytes = loss.dtype().itemsize();
  const auto count = [&bytes](const caffe2::TypeMeta dtype) {
    if (at::isFloatingType(dtype.toScalarType())) bytes = std::min(bytes, dtype.itemsize());
  };
  for (const auto* const tensors : {&model.parameters, &model.buffers})  // autograd does not see those that are frozen
    for (auto& tensor : *tensors) count(tensor.dtype());
  for_each_node(loss, [&](torch::autograd::Node& node) {
    for (std::uint32_t i = 0; i < node.num_inputs(); ++i)
      if (const auto& input = node.input_metadata(i); !input.was_default_constructed()) count(input.dtype());
  });
  return bytes <= 2 ? 0.1 : bytes == 8 ? 1e-9 : 1e-3;
}

/// The results of one forward and backward pass.
struct TrialResult {
  Loss loss;
  std::vector<at::Tensor> gradients;  ///< one per parameter; undefined if the loss does not depend on it
  std::vector<at::Tensor> buffers;
  RandomState random;
  double tolerance = 0;  ///< if autograd computed the gradients
};

/// Runs passes over one batch, each from the same buffers and random state, and restores these at the end.
class StepTrial {
 public:
  explicit StepTrial(const StepModel& model) : model_(model), begin_(model.buffers) {}
  StepTrial(const StepTrial&) = delete;
  StepTrial& operator=(const StepTrial&) = delete;
  ~StepTrial() { begin_.put_back(); }

  /// Runs one pass. Autograd computes the gradients, unless `run` stores them itself.
  TrialResult result(c10::function_ref<Loss()> run) const {
    double tolerance = 0;
    auto result = this->result([&](std::vector<at::Tensor>& gradients) {
      auto loss = run();
      loss.check();
      tolerance = tolerance_of(model_, loss.mean);
      const auto computed = torch::autograd::grad({loss.mean}, model_.trained(), {}, /*retain_graph=*/false,
                                                  /*create_graph=*/false, /*allow_unused=*/true);
      auto next = computed.begin();
      for (auto& parameter : model_.parameters) gradients.push_back(parameter.requires_grad() ? *next++ : at::Tensor());
      return loss;
    });
    result.tolerance = tolerance;
    return result;
  }
  TrialResult result(c10::function_ref<Loss(std::vector<at::Tensor>& gradients)> run) const {
    begin_.put_back();
    std::vector<at::Tensor> gradients;
    auto loss = run(gradients);
    return {std::move(loss), std::move(gradients), copies_of(model_.buffers), RandomState()};
  }

 private:
  const StepModel& model_;
  ForwardUndo begin_;
};

/// Exchanges what is in tensors for a scope, but where `other` returns an undefined tensor. Their memory, which others
/// may read, stays as it is.
class ExchangedTensors {
 public:
  ExchangedTensors(const std::vector<at::Tensor>& tensors, c10::function_ref<at::Tensor(const at::Tensor&)> other)
      : ExchangedTensors() {  // if `other` throws, the destructor puts back what is exchanged by then
    const at::NoGradGuard no_grad;
    for (auto& tensor : tensors) {
      const auto content = tensor.defined() ? other(tensor.detach()) : tensor;
      if (!content.defined()) continue;
      exchanged_.emplace_back(tensor, tensor.tensor_data());
      tensor.unsafeGetTensorImpl()->shallow_copy_from(content.getIntrusivePtr());
    }
  }
  ExchangedTensors(const ExchangedTensors&) = delete;
  ExchangedTensors& operator=(const ExchangedTensors&) = delete;
  ~ExchangedTensors() {
    at::autocast::clear_cache();
    for (; !exchanged_.empty(); exchanged_.pop_back())  // from the end: a tensor may be there twice
      exchanged_.back().first.unsafeGetTensorImpl()->shallow_copy_from(exchanged_.back().second.getIntrusivePtr());
  }

 private:
  ExchangedTensors() { at::autocast::clear_cache(); }
  std::vector<std::pair<at::Tensor, at::Tensor>> exchanged_;
};

GRADACCUM_INLINE double norm_in_double(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  if (tensor.numel() == 0) return 0;
  if (!tensor.is_floating_point()) return norm_in_double(tensor.to(at::kDouble));
  return at::linalg_vector_norm(tensor, 2, at::OptionalIntArrayRef(), /*keepdim=*/false, at::kDouble).item<double>();
}

/// A tensor of a step that differs beyond rounding from the objective's, for one or several sets of inputs.
struct StepDifference {
  std::string what;              ///< `the gradient of fc.weight`; a sentence if rounding does no such thing
  at::Tensor sum = {};           ///< sum of the differences, in double; undefined if rounding does no such thing
  double squares = 0, norm = 0;  ///< sum of their squared norms, and the norm that they are relative to
  int sets = 1;                  ///< number of sets of inputs with such a difference

  double size() const { return std::sqrt(squares / sets) / norm; }
  /// Returns the part of the difference that all inputs share: about 1 for another program, and 0 for rounding.
  double shared() const { return sum.defined() ? (std::pow(norm_in_double(sum), 2) / squares - 1) / (sets - 1) : 1; }
  std::string text() const { return sum.defined() ? c10::str(what, " differs by ", size(), " of its norm") : what; }
};

/// Returns what differs beyond the rounding of the dtypes used. `exact`: the objective's result in float32, if that has
/// 16 bits: where it is off itself by less than half, up to twice as far is rounding, too.
GRADACCUM_INLINE std::vector<StepDifference> differences_of_steps(const StepModel& model, const TrialResult& wanted,
                                                                  const TrialResult& got,
                                                                  const TrialResult* exact = nullptr) {
  const at::NoGradGuard no_grad;
  std::vector<StepDifference> found;
  // Compares a tensor, relative to its norm, or to a part of `scale`: one that cancels may be mere rounding.
  const auto compare = [&](const std::string& what, double scale, const auto& of) {
    const at::Tensor a = of(wanted), b = of(got);
    if (a.defined() != b.defined()) found.push_back({what + (a.defined() ? " is missing" : " should not be there")});
    if (!a.defined() || !b.defined()) return;
    const auto difference = [](const at::Tensor& one, const at::Tensor& other) {
      return one.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).add_(other, -1);
    };
    const auto norm = std::max(norm_in_double(a), std::sqrt(wanted.tolerance) * scale);
    if (!detail::is_finite(norm) && !detail::is_finite(norm_in_double(b))) return;
    auto off = difference(a, b);
    const auto size = norm_in_double(off), allowed = wanted.tolerance * norm;
    if (size <= allowed) return;
    if (exact) {  // an objective that is far off from it may be another function in float32, and excuses nothing
      const auto own = norm_in_double(difference(a, of(*exact)));
      if (norm_in_double(difference(b, of(*exact))) <= std::max(allowed, own <= 0.5 * norm ? 2 * own : 0)) return;
    }
    found.push_back({what, std::move(off), size * size, norm});
  };
  const auto norm_of = [](const std::vector<at::Tensor>& tensors, auto&& counts) {
    double norm = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (const auto one = counts(i) ? norm_in_double(tensors[i]) : 0; detail::is_finite(one))
        norm = std::hypot(norm, one);
    return norm;
  };
  const auto has_gradient = [&](std::size_t i) { return wanted.gradients[i].defined(); };
  const auto gradients = norm_of(wanted.gradients, has_gradient);
  compare("the loss", gradients * norm_of(model.parameters, has_gradient),
          [](auto& result) { return result.loss.mean.reshape({}); });
  if (wanted.loss.items != got.loss.items)
    found.push_back({c10::str("the loss is of ", got.loss.items, " items, not ", wanted.loss.items)});
  compare("the output", 0, [](auto& result) { return result.loss.output; });
  if (got.loss.target.defined()) compare("the target", 0, [](auto& result) { return result.loss.target; });
  for (std::size_t i = 0; i < model.parameters.size(); ++i)
    compare("the gradient of " + model.parameter_names[i], gradients,
            [i](auto& result) { return result.gradients[i]; });
  const auto module_of = [&](std::size_t i) {
    return model.buffer_names[i].substr(0, model.buffer_names[i].rfind('.') + 1);
  };
  for (std::size_t i = 0; i < model.buffers.size(); ++i) {
    const auto of_module = norm_of(wanted.buffers, [&](std::size_t other) {
      return model.buffers[i].is_floating_point() && model.buffers[other].is_floating_point() &&
             model.buffers[i].sizes() == model.buffers[other].sizes() && module_of(other) == module_of(i);
    });
    compare("the buffer " + model.buffer_names[i], of_module, [i](auto& result) { return result.buffers[i]; });
  }
  if (!(wanted.random == got.random)) found.push_back({"random numbers were drawn otherwise"});
  return found;
}

using NodePointer = decltype(torch::autograd::Edge::function);  // the kind of pointer depends on LibTorch's version

template <class Node, class... Arguments>
NodePointer new_node(Arguments&&... arguments) {
  if constexpr (std::same_as<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

/// Returns the node that accumulates a parameter's gradient; null if it is another kind of node or has hooks, but for
/// those that `say_added` tells.
GRADACCUM_INLINE torch::autograd::AccumulateGrad* accumulator_without_hooks(const torch::autograd::Edge& edge) {
  auto* const node = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  const bool has_hooks = !node || !node->pre_hooks().empty() || !node->post_hooks().empty() ||
                         !node->tensor_pre_hooks().empty() || is_waited_for(node->variable);
  return has_hooks ? nullptr : node;
}

GRADACCUM_INLINE std::int64_t index_of_target(const Loss& loss, const std::vector<at::Tensor>& batch) {
  if (!loss.target.defined()) return GraphDescription::no_target;
  for (std::size_t i = 0; i < batch.size(); ++i)
    if (batch[i].is_same(loss.target)) return static_cast<std::int64_t>(i);
  return GraphDescription::computed_target;
}

/// Returns what tells batches of other shapes, dtypes or devices apart.
GRADACCUM_INLINE std::vector<std::int64_t> layout_key(const std::vector<at::Tensor>& batch) {
  std::vector<std::int64_t> key;
  for (auto& tensor : batch) {
    key.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
    key.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.device().type()) : 0);
    key.push_back(tensor.defined() ? tensor.dim() : 0);
    if (tensor.defined()) key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return key;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
