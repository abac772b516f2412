// SPDX-License-Identifier: Apache-2.0
// Runs trial steps of a model, compares their results, and loads and runs compiled steps.
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/compilation/step_memory.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/types/uncounted.hpp>
#include <gradaccum/detail/window/fused_gradients.hpp>
#include <gradaccum/version.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Modes that change a forward pass: flags of training, and autocast.
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

  bool has(at::ScalarType dtype) const {
    return std::ranges::any_of(seen_, [dtype](const Seen& seen) { return seen.dtype == dtype; });
  }

  /// True if the model has LibTorch's MultiheadAttention, which compares query, key and value.
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

  /// Returns the device that all tensors are on, a CPU or a CUDA device; nullopt if there is none.
  std::optional<at::Device> device() const {
    const auto device = seen_.empty() ? at::Device(at::kCPU) : seen_.front().tensor.device();
    const bool together = std::ranges::all_of(seen_, [&](auto& seen) { return seen.tensor.device() == device; });
    return together && (device.is_cpu() || device.is_cuda()) ? std::optional(device) : std::nullopt;
  }

  /// True if everything in `text` and all addresses are as at construction. `may_be_frozen`: parameters may have been
  /// frozen.
  bool unchanged(bool may_be_frozen = false) const {
    return std::ranges::all_of(seen_, [may_be_frozen](const Seen& seen) {
      const auto& tensor = seen.tensor;
      return tensor.device() == seen.device && tensor.scalar_type() == seen.dtype &&
             (tensor.requires_grad() == seen.trainable || (may_be_frozen && seen.trainable)) &&
             tensor.sizes() == at::IntArrayRef(seen.sizes) && tensor.strides() == at::IntArrayRef(seen.strides);
    });
  }

 private:
  struct Seen {
    at::Tensor tensor;
    std::vector<std::int64_t> sizes, strides;
    at::Device device;
    at::ScalarType dtype;
    bool trainable;
  };

  void add(const std::string& name, const at::Tensor& tensor, std::vector<at::Tensor>& tensors,
           std::vector<std::string>& names) {
    if (!tensor.defined()) return;
    if (std::ranges::any_of(seen_, [&](const Seen& seen) { return seen.tensor.is_same(tensor); })) return;
    tensors.push_back(tensor);
    names.push_back(name);
    seen_.push_back({tensor, tensor.sizes().vec(), tensor.strides().vec(), tensor.device(), tensor.scalar_type(),
                     tensor.requires_grad()});
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
  for (const auto* const tensors : {&model.parameters, &model.buffers})  // autograd does not see frozen ones
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
  GeneratorStates random;
  double tolerance = 0;  ///< if autograd computed the gradients
};

/// Runs passes over one batch, each from the same buffers and random state, and restores these at the end.
class StepTrial {
 public:
  explicit StepTrial(const StepModel& model) : model_(model), begin_(model.buffers) {}
  StepTrial& operator=(StepTrial&&) = delete;
  ~StepTrial() { begin_.put_back(); }

  /// Runs one pass, which FlopCounters do not count. Autograd computes the gradients, unless `run` stores them itself.
  TrialResult result(c10::function_ref<Loss()> run) const {
    const UncountedScope uncounted;
    return counted_result(run);
  }
  TrialResult counted_result(c10::function_ref<Loss()> run) const {
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
    return {std::move(loss), std::move(gradients), copies_of(model_.buffers), GeneratorStates()};
  }

 private:
  const StepModel& model_;
  ForwardUndo begin_;
};

/// Replaces the contents of tensors for a scope, except where `other` returns an undefined tensor. Leaves their memory
/// unchanged, which other tensors may share.
class ExchangedTensors {
 public:
  ExchangedTensors(const std::vector<at::Tensor>& tensors, c10::function_ref<at::Tensor(const at::Tensor&)> other)
      : ExchangedTensors() {  // if `other` throws, the destructor undoes the exchanges so far
    const at::NoGradGuard no_grad;
    for (auto& tensor : tensors) {
      const auto content = tensor.defined() ? other(tensor.detach()) : tensor;
      if (!content.defined()) continue;
      exchanged_.emplace_back(tensor, tensor.tensor_data());
      tensor.unsafeGetTensorImpl()->shallow_copy_from(content.getIntrusivePtr());
    }
  }
  ExchangedTensors& operator=(ExchangedTensors&&) = delete;
  ~ExchangedTensors() {
    at::autocast::clear_cache();
    for (; !exchanged_.empty(); exchanged_.pop_back())  // from the end: a tensor may be listed twice
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

/// Tensor of a step that differs from the objective's by more than rounding, for one or several sets of inputs.
struct StepDifference {
  std::string what;              ///< `the gradient of fc.weight`; a sentence if rounding cannot be the cause
  at::Tensor sum = {};           ///< sum of the differences, in double; undefined if rounding cannot be the cause
  double squares = 0, norm = 0;  ///< sum of their squared norms, and the norm that they are relative to
  int sets = 1;                  ///< number of sets of inputs with such a difference

  double size() const { return std::sqrt(squares / sets) / norm; }
  /// Returns the part of the difference that all inputs share: about 1 for another program, and 0 for rounding.
  double shared() const { return sum.defined() ? (std::pow(norm_in_double(sum), 2) / squares - 1) / (sets - 1) : 1; }
  std::string text() const { return sum.defined() ? c10::str(what, " differs by ", size(), " of its norm") : what; }
};

/// Returns tensors that differ by more than rounding in the dtypes used. `exact`: the result of a 16-bit objective in
/// float32. Where the objective differs from it by at most half of the norm, the step may differ from it twice as much.
GRADACCUM_INLINE std::vector<StepDifference> differences_of_steps(const StepModel& model, const TrialResult& wanted,
                                                                  const TrialResult& got,
                                                                  const TrialResult* exact = nullptr) {
  const at::NoGradGuard no_grad;
  std::vector<StepDifference> found;
  // Compares a tensor, relative to its norm or to a part of `scale`, since a tensor whose terms cancel may be only
  // rounding.
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
    if (exact) {  // an objective far from it may be another function in float32: no allowance
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

GRADACCUM_INLINE std::int64_t index_of_target(const Loss& loss, const std::vector<at::Tensor>& batch) {
  if (!loss.target.defined()) return GraphDescription::no_target;
  for (std::size_t i = 0; i < batch.size(); ++i)
    if (batch[i].is_same(loss.target)) return static_cast<std::int64_t>(i);
  return GraphDescription::computed_target;
}

/// Returns a key that differs for batches of different shapes, dtypes or devices.
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

/// The compiled code of a graph: a function from tensors to tensors.
class StepCode {
 public:
  /// Starts the code of a function table that generated code exports. `library`: its owner, unless the program has it.
  StepCode(void* const* functions, at::Device device, std::shared_ptr<void> library = nullptr)
      : functions_(reinterpret_cast<const Functions*>(functions)) {
    void* container = nullptr;
    const c10::OptionalDeviceGuard as_before(device.is_cpu() ? std::nullopt : std::optional(device));  // restored
    const auto* const error = functions_->create(&container, device.str().c_str());
    TORCH_CHECK(!error, "CompiledStep, ExportedModel: the compiled code must start, got ", error);
    container_ = {container, [destroy = functions_->destroy, library](void* old) { destroy(old); }};
    outputs_ = functions_->outputs(container);
  }

  std::size_t inputs() const { return functions_->inputs(container_.get()); }
  std::size_t outputs() const { return outputs_; }

  /// Runs the code without autograd and autocast, which are compiled into it. Several threads may call it in turn.
  /// `more` returns a text that is added to the error of a failure.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, StepMemory& memory,
                              c10::function_ref<std::string(const std::string& error)> more) const {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::vector<void*> given, got(outputs_);
    given.reserve(inputs.size());
    for (auto& tensor : inputs) given.push_back(new at::Tensor(tensor));  // the code deletes them, even on failure
    const auto* const error =
        functions_->run(container_.get(), given.data(), got.data(), &StepMemory::empty_strided, &memory);
    TORCH_CHECK(!error, "CompiledStep, ExportedModel: the compiled code failed: ", error, more(error));
    std::vector<at::Tensor> outputs;
    outputs.reserve(got.size());
    for (auto output = got.begin(); output != got.end(); ++output) {
      auto* const tensor = static_cast<at::Tensor*>(*output);
      const bool again = std::find(output + 1, got.end(), *output) != got.end();
      const std::unique_ptr<at::Tensor> last(again ? nullptr : tensor);
      // Two parameters may have one gradient, and each needs separate memory.
      outputs.push_back(again || tensor->storage().use_count() > 1 ? tensor->clone() : *tensor);
    }
    return outputs;
  }

 private:
  /// Table of functions, in the order in which code generated by gradaccum-compile-step exports them. Returned strings
  /// are errors, or null.
  struct Functions {
    const char* (*create)(void** container, const char* device);
    void (*destroy)(void* container);
    const char* (*run)(void* container, void** inputs, void** outputs, decltype(&StepMemory::empty_strided) empty,
                       void* memory);
    std::size_t (*inputs)(void* container);
    std::size_t (*outputs)(void* container);
  };

  const Functions* functions_;
  std::shared_ptr<void> container_;  // owns the library, too
  std::size_t outputs_ = 0;
};

/// Calls `visit(name, member)` for each member of a graph, by its name in a manifest. `Graph` may be const.
template <class Graph>
void for_each_member(Graph& graph, auto&& visit) {
  visit("kind", graph.kind);
  visit("names", graph.names);
  visit("batch", graph.batch);
  visit("any_rows", graph.any_rows);
  visit("least_rows", graph.least_rows);
  visit("items", graph.items);
  visit("output", graph.output);
  visit("target", graph.target);
  visit("trace", graph.trace);
  visit("operations", graph.operations);
  visit("code", graph.code);
  visit("gradients", graph.gradients);
  visit("moved", graph.moved);
  visit("capability", graph.capability);
}

GRADACCUM_INLINE std::string name_of_graph(std::size_t number) { return "graph-" + std::to_string(number); }

GRADACCUM_INLINE Manifest manifest_of(const StepDescription& step) {
  Manifest manifest;
  manifest.format = step_format;
  manifest.gradaccum = plain_text(GRADACCUM_VERSION_MAJOR, ".", GRADACCUM_VERSION_MINOR, ".", GRADACCUM_VERSION_PATCH);
  manifest.libtorch = TORCH_VERSION;
  manifest.values["model"] = step.model;
  manifest.values["modes"] = step.modes;
  manifest.values["graphs"] = static_cast<std::int64_t>(step.graphs.size());
  for (std::size_t i = 0; i < step.graphs.size(); ++i)
    for_each_member(step.graphs[i], [&](const std::string& name, const auto& value) {
      manifest.values[name_of_graph(i) + "." + name] = value;
    });
  return manifest;
}

GRADACCUM_INLINE StepDescription step_description(const Manifest& manifest, const std::string& what) {
  const auto fail = [&](const std::string& requirement) { throw std::runtime_error(what + ": " + requirement); };
  const auto read = [&]<class Value>(const std::string& name, Value& to) {
    const auto found = manifest.values.find(name);
    if (found == manifest.values.end() && name.ends_with(".operations")) return;  // an exported or an earlier step
    if (found == manifest.values.end()) fail("must have a value " + in_quotes(name));
    const auto* const value = std::get_if<Value>(&found->second);
    if (!value) fail("the value " + in_quotes(name) + " must be of another type");
    to = *value;
  };
  StepDescription step;
  std::int64_t graphs = 0;
  read("model", step.model);
  read("modes", step.modes);
  read("graphs", graphs);
  if (graphs < 1 || static_cast<std::size_t>(graphs) > manifest.values.size())
    fail("the number of graphs must fit its values, got " + std::to_string(graphs));
  for (std::int64_t i = 0; i < graphs; ++i) {
    const auto name = name_of_graph(static_cast<std::size_t>(i));
    auto& graph = step.graphs.emplace_back();
    for_each_member(graph, [&](const std::string& member, auto& value) { read(name + "." + member, value); });
    if (graph.code.find_first_not_of("0123456789abcdef") != std::string::npos)
      fail("the code of " + name + " must be a name of digits 0-9 a-f, got " + in_quotes(graph.code));
    if (!(detail::is_finite(graph.items) && graph.items >= 0) && graph.items != GraphDescription::computed_items)
      fail("the items of " + name + " must be >= 0, or -1");
    if (graph.batch.empty()) fail("the batch of " + name + " must have tensors");
    if (graph.least_rows < 1) fail("the least rows of " + name + " must be >= 1");
  }
  return step;
}

GRADACCUM_INLINE std::map<std::string, StepInProgram>& steps_in_program() {
  static std::map<std::string, StepInProgram> steps;
  return steps;
}

/// Returns the path of a file of a folder. Throws unless it is as in the manifest. It may be a link, as in Hugging
/// Face's cache.
GRADACCUM_INLINE std::filesystem::path listed_file(const std::filesystem::path& folder, const Manifest& manifest,
                                                   const std::string& name) {
  const auto listed = manifest.files.find(name);
  if (listed == manifest.files.end())
    throw std::runtime_error((folder / manifest_name).string() + ": must list the file " + name);
  std::error_code missing;
  const auto file = std::filesystem::canonical(folder / name, missing);
  check_file(missing ? folder / name : file, listed->second);
  return folder / name;
}

/// Returns the step that has this name in the program. `owner`: the class that errors name.
GRADACCUM_INLINE const StepInProgram& step_in_program(const std::string& name, const char* owner) {
  const auto found = steps_in_program().find(name);
  if (found != steps_in_program().end()) return found->second;
  std::string names;
  for (auto& [known, step] : steps_in_program()) names += " " + known;
  TORCH_CHECK(false, owner, ": InProgram{\"", name, "\"} must be a step that gradaccum_compile_step ",
              "built into this program, which has", names.empty() ? " none" : names);
}

/// The source of a compiled step: a folder, or this program.
class StepSource {
 public:
  explicit StepSource(const std::filesystem::path& folder, std::string_view format = step_format)
      : name((folder / manifest_name).string()),
        manifest(manifest_of(MappedFile(name).text(), name, format)),  // which may be a link, too
        folder_(folder) {}
  StepSource(std::string step_name, const StepInProgram& step, std::string_view format)
      : name(std::move(step_name)), manifest(manifest_of(step.manifest, name, format)), in_program_(&step) {}

  /// Loads the code of a graph, which runs with this program's rights. Checks a file against the manifest first. Throws
  /// `std::runtime_error` with the path.
  StepCode code(std::size_t number, const GraphDescription& graph, at::Device device) const {
    if (in_program_) {
      const auto found = in_program_->code.find(graph.code);
      if (found == in_program_->code.end())
        throw std::runtime_error(name + ": the program must have its code " + graph.code);
      return StepCode(found->second, device);
    }
    const auto file = name_of_graph(number) + "." + graph.code + ".so";
    const auto path = std::filesystem::absolute(listed_file(folder_, manifest, file));
    const auto library = load_library(path);
    const auto* const functions = find_symbol(library.get(), "gradaccum_code_" + graph.code);
    if (!functions)
      throw std::runtime_error(path.string() + ": must be the code " + graph.code + " of a step: compile it again");
    return StepCode(static_cast<void* const*>(functions), device, library);
  }

  const std::string name;  ///< in error messages
  Manifest manifest;

 private:
  std::filesystem::path folder_;
  const StepInProgram* in_program_ = nullptr;
};

/// Gradients computed with the loss, and a function that recomputes them.
struct ComputedGradients {
  std::vector<at::Tensor> gradients;  ///< in the order of the parameters
  int exponent = 0;                   ///< exponent of the seed they were computed with
  /// Recomputes them with another exponent. Empty if nothing underflows, since a factor of a power of two is then
  /// exact.
  std::function<std::vector<at::Tensor>(int exponent)> again = {};
};

/// The only operation of a compiled step that autograd sees.
class CompiledBackward final : public torch::autograd::Node {
 public:
  /// `next_exponent` receives the exponent of the seed (a loss scale or a weight), which predicts the next one.
  CompiledBackward(ComputedGradients computed, std::shared_ptr<int> next_exponent)
      : computed_(std::move(computed)), next_exponent_(std::move(next_exponent)) {}

  std::string name() const override { return "CompiledBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& seeds) override {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "CompiledStep, ExportedModel: create_graph must be false: compiled code has no double backward");
    const bool retain = torch::autograd::get_current_graph_task_keep_graph();
    if (seeds[0].is_cpu() || computed_.again) return gradients(seeds[0].item<double>(), retain);
    return multiplied(taken(retain), seeds[0].reshape({}), retain);  // does not wait for a seed on a device
  }

  std::vector<at::Tensor> gradients(double seed, bool retain) {
    if (detail::is_finite(seed) && seed != 0) *next_exponent_ = std::ilogb(seed);
    auto gradients = taken(retain);
    auto exponent = computed_.exponent;
    if (computed_.again && *next_exponent_ != exponent) {
      gradients = computed_.again(exponent = *next_exponent_);
      retain = false;
    }
    const auto factor = seed / std::exp2(exponent);
    return factor == 1 ? gradients : multiplied(std::move(gradients), factor, retain);
  }

  void release_variables() override {
    computed_.gradients.clear();
    computed_.again = nullptr;
  }

 private:
  static std::vector<at::Tensor> multiplied(std::vector<at::Tensor> gradients, const auto& by, bool retain) {
    if (retain) return at::_foreach_mul(gradients, by);
    at::_foreach_mul_(gradients, by);
    return gradients;
  }
  std::vector<at::Tensor> taken(bool retain) {
    TORCH_CHECK(!computed_.gradients.empty(),
                "CompiledStep, ExportedModel: backward must run only once, unless .retain_graph is true");
    return retain ? computed_.gradients : std::exchange(computed_.gradients, {});
  }

  ComputedGradients computed_;
  std::shared_ptr<int> next_exponent_;
};

GRADACCUM_INLINE std::vector<at::Tensor> gradients_of_step(const NodePointer& node, const at::Tensor& seed) {
  if (!seed.is_cpu()) return {};
  auto gradients = static_cast<CompiledBackward&>(*node).gradients(seed.item<double>(), /*retain=*/false);
  node->release_variables();
  return gradients;
}

/// Describes the first line in which two texts differ.
GRADACCUM_INLINE std::string first_difference(const std::string& saved, const std::string& now) {
  if (saved == now) return "another device";
  std::istringstream saved_lines(saved), now_lines(now);
  for (;;) {
    std::string one, other;
    const bool more = static_cast<bool>(std::getline(saved_lines, one)),
               others = static_cast<bool>(std::getline(now_lines, other));
    if (one != other || !(more || others))
      return (one.empty() ? "nothing" : "'" + one + "'") + ", now " + (other.empty() ? "nothing" : "'" + other + "'");
  }
}

GRADACCUM_INLINE bool processor_has(const std::string& capability) {
#if defined(__x86_64__)
  if (capability == "AVX2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (capability == "AVX512")
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#endif
  return capability == "DEFAULT" || capability.starts_with("CUDA ");  // code checks the device
}

/// Loaded graph of a step.
struct StepGraph {
  GraphDescription description;
  StepCode code;
  std::vector<at::Tensor> parameters;  ///< parameters with a gradient
  std::vector<at::Tensor> moved;       ///< buffers that the step changes
};

GRADACCUM_INLINE std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()};
}

/// Returns the positions in a batch of an index that an error of compiled code reports, such as `; labels has it at
/// [20]`.
GRADACCUM_INLINE std::string places_of_index(const std::string& error, const std::vector<at::Tensor>& batch,
                                             const StepGraph& graph) {
  long long index = 0, lower = 0, upper = 0;
  if (std::sscanf(error.c_str(), "index %lld must be in [%lld, %lld)", &index, &lower, &upper) != 3) return "";
  std::string text;
  const auto names = words_of(graph.description.names);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto name = i < names.size() ? names[i] : c10::str("tensor ", i, " of the batch");
    if (!batch[i].defined() || !at::isIntegralType(batch[i].scalar_type(), /*includeBool=*/false)) continue;
    const auto found = batch[i].eq(index).nonzero().cpu().contiguous();
    if (found.size(0) == 0) continue;
    const at::IntArrayRef first(found.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(found.size(1)));
    text += c10::str("; ", name, " has it at ", first);
  }
  return text;
}

/// Loads and runs the graphs of a model. `owner`: the class that errors name.
class StepGraphs final : public std::enable_shared_from_this<StepGraphs> {
 public:
  StepGraphs(const std::string& owner, StepModel model, const StepSource& source)
      : model_(std::move(model)), name_(owner + ": " + source.name) {
    TORCH_CHECK(source.manifest.libtorch == TORCH_VERSION, name_, ": must be made with LibTorch ", TORCH_VERSION,
                ", got ", source.manifest.libtorch, ": make and compile it again");
    description_ = step_description(source.manifest, source.name);
    const auto now = model_.text();
    TORCH_CHECK(description_.model == now, name_, ": the model must be as it was saved; it had ",
                first_difference(description_.model, now), ": make and compile it again");
    const auto device = model_.device();
    TORCH_CHECK(device, name_, ": the model must be on one device, a CPU or a CUDA device");
    device_ = *device;
    for (std::size_t i = 0; i < description_.graphs.size(); ++i) check_graph(i);
    graphs_.reserve(description_.graphs.size());
    for (std::size_t i = 0; i < description_.graphs.size(); ++i) load(i, source);
    in_float16_ = description_.autocast() == "Half" || model_.has(at::kHalf);
    if (in_float16_) *next_exponent_ = 16;  // the loss scale that AmpScaler begins with
  }

  const StepModel& model() const { return model_; }
  const StepDescription& description() const { return description_; }
  const std::vector<StepGraph>& graphs() const { return graphs_; }
  /// Returns the beginning of error messages: the owner, and the name of the source.
  const std::string& name() const { return name_; }
  /// True if a step synchronizes with its device, to read the seed of a float16 loss.
  bool waits() const { return in_float16_; }

  /// Returns the graph for a batch's layout that `fits` accepts; null if there is none.
  const StepGraph* find(const std::vector<at::Tensor>& batch,
                        c10::function_ref<bool(const GraphDescription&)> fits) const {
    const auto find = [&](const std::string& text, std::string GraphDescription::*of) -> const StepGraph* {
      const auto found = std::ranges::find_if(
          graphs_, [&](auto& graph) { return graph.description.*of == text && fits(graph.description); });
      return found == graphs_.end() ? nullptr : &*found;
    };
    for (auto& tensor : batch)
      if (tensor.defined() && !tensor.is_cpu() && tensor.device() != device_) return nullptr;
    if (const auto* const graph = find(layout_text(batch), &GraphDescription::batch)) return graph;
    const auto rows = [](const at::Tensor& of) { return of.defined() && of.dim() > 0 ? of.size(0) : 0; };
    const auto as_many = [&](auto& tensor) { return rows(tensor) == rows(batch.front()); };
    if (batch.empty() || !std::ranges::all_of(batch, as_many)) return nullptr;
    const auto* const graph = find(layout_text(batch, true), &GraphDescription::any_rows);
    return graph && rows(batch.front()) >= graph->description.least_rows ? graph : nullptr;
  }

  /// Runs a training step, whose loss adds its gradients to the parameters in backward.
  Loss trained(const StepGraph& graph, std::vector<at::Tensor> batch) const {
    batch = contiguous_of(batch);
    const bool knows_seeds = device_.is_cpu() || in_float16_;  // not read from a device
    ComputedGradients computed{{}, knows_seeds ? *next_exponent_ : 0};
    if (in_float16_) computed.again = run_again(graph, batch);
    auto loss = run(graph, batch, computed.gradients, computed.exponent);
    if (!at::GradMode::is_enabled()) return loss;
    const auto node = new_node<CompiledBackward>(std::move(computed), next_exponent_);
    node->set_next_edges(torch::autograd::collect_next_edges(graph.parameters));
    torch::autograd::set_history(loss.mean, node);
    return loss.with_gradients(graph.parameters, std::bind_front(&gradients_of_step, node));
  }

  /// Runs a pass that has no gradients.
  Loss evaluated(const StepGraph& graph, std::vector<at::Tensor> batch) const {
    std::vector<at::Tensor> gradients;
    return run(graph, contiguous_of(std::move(batch)), gradients, 0);
  }

  /// Runs a trial step, and stores its gradients, one for each parameter.
  TrialResult tried(const StepTrial& trial, const StepGraph& graph, const std::vector<at::Tensor>& batch) const {
    return trial.result([&](std::vector<at::Tensor>& gradients) {
      std::vector<at::Tensor> computed;
      auto loss = run(graph, contiguous_of(batch), computed, 0);
      auto next = computed.begin();
      for (const auto there : graph.description.gradients)
        gradients.push_back(there == 'y' ? std::move(*next++) : at::Tensor());
      return loss;
    });
  }

 private:
  void check_graph(std::size_t number) const {
    const auto& graph = description_.graphs[number];
    const auto what = name_ + ": " + name_of_graph(number);
    TORCH_CHECK(!graph.code.empty(), what, " must be compiled first: run gradaccum-compile-step on this folder");
    TORCH_CHECK(processor_has(graph.capability), what, " is compiled for processors with ", graph.capability,
                ", which this one lacks: compile it with --capability AVX2, or on this machine");
    TORCH_CHECK(graph.gradients.size() == model_.parameters.size() && graph.moved.size() == model_.buffers.size(), what,
                " must describe every parameter and buffer, of which there are ", model_.parameters.size(), " and ",
                model_.buffers.size());
  }

  /// Loads a graph. Checks the numbers of inputs and outputs of its code, and the index of the target.
  void load(std::size_t number, const StepSource& source) {
    const auto& description = description_.graphs[number];
    StepGraph graph{description, source.code(number, description, device_), {}, {}};
    for (std::size_t i = 0; i < model_.parameters.size(); ++i)
      if (description.gradients[i] == 'y') graph.parameters.push_back(model_.parameters[i]);
    for (std::size_t i = 0; i < model_.buffers.size(); ++i)
      if (description.moved[i] == 'y') graph.moved.push_back(model_.buffers[i]);
    const auto name = name_ + ": " + name_of_graph(number);
    const auto batch = static_cast<std::size_t>(std::ranges::count(description.batch, '['));
    const auto inputs = model_.parameters.size() + model_.buffers.size() + batch + 1;
    const auto outputs = 1u + description.output + (description.target == GraphDescription::computed_target) +
                         (description.items == GraphDescription::computed_items) + graph.parameters.size();
    TORCH_CHECK(graph.code.inputs() == inputs && graph.code.outputs() == outputs, name, ": must take ", inputs,
                " tensors and give ", outputs, ", got ", graph.code.inputs(), " and ", graph.code.outputs());
    TORCH_CHECK(
        description.target < static_cast<std::int64_t>(batch) && description.target >= GraphDescription::no_target,
        name, ": the target must be one of ", batch, " tensors, got ", description.target);
    graphs_.push_back(std::move(graph));
  }

  /// Runs the code, and splits its outputs into the loss, its output and target for metrics, its number of items, and
  /// gradients.
  Loss run(const StepGraph& graph, const std::vector<at::Tensor>& batch, std::vector<at::Tensor>& gradients,
           int exponent) const {
    const UncountedScope uncounted;  // the code has only some of the operations
    auto inputs = inputs_of(model_, batch);
    inputs.push_back(at::scalar_tensor(std::exp2(exponent), at::TensorOptions(at::kFloat).device(device_)));
    auto outputs = graph.code.run(inputs, memory_, [&](auto& error) { return places_of_index(error, batch, graph); });
    for (auto& buffer : graph.moved) buffer.unsafeGetTensorImpl()->bump_version();
    auto next = outputs.begin();
    const auto& description = graph.description;
    const bool of_rows = description.items == GraphDescription::items_are_rows;
    Loss loss(std::move(*next++), of_rows ? static_cast<double>(batch.front().size(0)) : description.items);
    if (description.output) loss.output = std::move(*next++);
    if (description.target == GraphDescription::computed_target) loss.target = std::move(*next++);
    if (description.target >= 0) loss.target = batch[static_cast<std::size_t>(description.target)];
    if (description.items == GraphDescription::computed_items) loss.items = (next++)->item<double>();
    gradients.assign(std::make_move_iterator(next), std::make_move_iterator(outputs.end()));
    return loss;
  }

  /// Returns a function that reruns the step from the current buffers and random state, and then restores the previous
  /// ones.
  std::function<std::vector<at::Tensor>(int)> run_again(const StepGraph& graph,
                                                        const std::vector<at::Tensor>& batch) const {
    const auto versions = [](const std::vector<at::Tensor>& tensors) {
      std::int64_t sum = 0;
      for (auto& tensor : tensors) sum += tensor._version();
      return sum;
    };
    return [self = shared_from_this(), &graph, batch, versions, at = versions(model_.parameters),
            before = ForwardUndo(model_.buffers)](int exponent) {
      TORCH_CHECK(versions(self->model_.parameters) == at,
                  "CompiledStep, ExportedModel: parameters must not change between a float16 loss and its backward");
      const StepTrial around(self->model_);
      before.put_back();
      std::vector<at::Tensor> gradients;
      self->run(graph, batch, gradients, exponent);
      return gradients;
    };
  }

  static std::vector<at::Tensor> contiguous_of(std::vector<at::Tensor> batch) {
    for (auto& tensor : batch)
      if (tensor.defined()) tensor = tensor.detach().contiguous();
    return batch;
  }

  StepModel model_;
  std::string name_;
  at::Device device_ = at::kCPU;
  StepDescription description_;
  mutable StepMemory memory_;  // of all graphs, because one runs at a time
  std::vector<StepGraph> graphs_;
  bool in_float16_ = false;
  std::shared_ptr<int> next_exponent_ = std::make_shared<int>(0);
};

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
