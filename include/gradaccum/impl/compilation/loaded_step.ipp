// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/loaded_step.hpp>

#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/passes/shape_analysis.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void SeedExponent::follow(double seed) {
  if (!std::isfinite(seed) || seed == 0) return;
  static_cast<void>(std::frexp(seed, &value));
  --value;
}

/// The only operation of a compiled step that autograd sees.
class CompiledBackward final : public torch::autograd::Node {
 public:
  CompiledBackward(ComputedGradients computed, std::shared_ptr<SeedExponent> next)
      : computed_(std::move(computed)), next_(std::move(next)) {}

  std::string name() const override { return "CompiledBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& seeds) override {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "CompiledStep: create_graph must be false: a compiled step has no gradients of gradients");
    return gradients(seeds[0].item<double>(), torch::autograd::get_current_graph_task_keep_graph());
  }

  std::vector<at::Tensor> gradients(double seed, bool kept) {
    TORCH_CHECK(!computed_.gradients.empty(), "CompiledStep: backward runs once, unless .retain_graph is true");
    next_->follow(seed);
    return times(seed, kept ? computed_.gradients : std::exchange(computed_.gradients, {}), kept);
  }

  void release_variables() override {
    computed_.gradients.clear();
    computed_.again = nullptr;
  }

 private:
  std::vector<at::Tensor> times(double seed, std::vector<at::Tensor> gradients, bool kept) const {
    auto exponent = computed_.exponent;
    if (computed_.again && next_->value != exponent) {
      gradients = computed_.again(exponent = next_->value);
      kept = false;
    }
    const auto rest = seed / std::exp2(exponent);
    if (rest == 1) return gradients;
    for (auto& gradient : gradients) gradient = kept ? gradient.mul(rest) : gradient.mul_(rest);
    return gradients;
  }

  ComputedGradients computed_;
  std::shared_ptr<SeedExponent> next_;
};

using NodePointer = decltype(torch::autograd::Edge::function);  // the kind of pointer depends on LibTorch's version

template <class Node, class... Arguments>
NodePointer new_node(Arguments&&... arguments) {
  if constexpr (std::same_as<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

/// Returns the node that accumulates a parameter's gradient; null if it is another kind of node or has hooks.
GRADACCUM_INLINE torch::autograd::AccumulateGrad* unheard(const torch::autograd::Edge& edge) {
  auto* const node = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  const bool heard = !node || !node->pre_hooks().empty() || !node->post_hooks().empty() ||
                     !node->tensor_pre_hooks().empty() || node->tensor_post_acc_grad_hooks();
  return heard ? nullptr : node;
}

/// Adds gradients without autograd's engine, which takes as long as a small network.
class AddedGradients final : public ReadyGradients {
 public:
  explicit AddedGradients(NodePointer node) : node_(std::move(node)) {}

  bool add(const at::Tensor& loss, double seed) override {
    if (loss.grad_fn().get() != node_.get()) return false;
    std::vector<torch::autograd::AccumulateGrad*> parameters;
    for (auto& edge : node_->next_edges()) {
      parameters.push_back(unheard(edge));
      if (!parameters.back()) return false;
    }
    const at::NoGradGuard no_grad;
    auto gradients = static_cast<CompiledBackward&>(*node_).gradients(seed, /*kept=*/false);
    node_->release_variables();
    for (std::size_t i = 0; i < parameters.size(); ++i) add_to(parameters[i]->variable, std::move(gradients[i]));
    return true;
  }

 private:
  static void add_to(at::Tensor& parameter, at::Tensor gradient) {
    auto& sum = parameter.mutable_grad();
    torch::autograd::AccumulateGrad::accumulateGrad(parameter, sum, gradient, /*num_expected_refs=*/1,
                                                    [&sum](at::Tensor&& updated) { sum = std::move(updated); });
  }

  NodePointer node_;
};

GRADACCUM_INLINE std::shared_ptr<ReadyGradients> set_gradients(const at::Tensor& loss,
                                                               const std::vector<at::Tensor>& parameters,
                                                               ComputedGradients computed,
                                                               std::shared_ptr<SeedExponent> next) {
  const auto node = new_node<CompiledBackward>(std::move(computed), std::move(next));
  node->set_next_edges(torch::autograd::collect_next_edges(parameters));
  torch::autograd::set_history(loss, node);
  return std::make_shared<AddedGradients>(node);
}

GRADACCUM_INLINE StepModel::StepModel(torch::nn::Module& module) {
  for (auto& item : module.named_parameters()) add(item.key(), item.value(), parameters, parameter_names);
  for (auto& item : module.named_buffers()) add(item.key(), item.value(), buffers, buffer_names);
  modules_.emplace_back("", &module);  // need not be owned by a shared_ptr
  for (auto& item : module.named_modules("", /*include_self=*/false))
    modules_.emplace_back(item.key(), item.value().get());
}

GRADACCUM_INLINE void StepModel::add(const std::string& name, const at::Tensor& tensor,
                                     std::vector<at::Tensor>& tensors, std::vector<std::string>& names) {
  if (!tensor.defined()) return;
  if (std::ranges::any_of(seen_, [&](const Seen& seen) { return seen.tensor.is_same(tensor); })) return;
  tensors.push_back(tensor);
  names.push_back(name);
  seen_.push_back({tensor, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.requires_grad()});
}

GRADACCUM_INLINE std::string StepModel::text() const {
  std::string text;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    text += parameter_names[i] + " " + layout_text(parameters[i]) +
            (parameters[i].requires_grad() ? " parameter\n" : " frozen parameter\n");
  for (std::size_t i = 0; i < buffers.size(); ++i)
    text += buffer_names[i] + " " + layout_text(buffers[i]) + " buffer\n";
  return text;
}

GRADACCUM_INLINE StepModes StepModel::modes() const {
  StepModes modes;
  modes.training.reserve(modules_.size());
  for (auto& [name, module] : modules_) modes.training.push_back(module->is_training());
  if (at::autocast::is_autocast_enabled(at::kCPU)) modes.autocast = at::autocast::get_autocast_dtype(at::kCPU);
  return modes;
}

/// Describes modes as `training but dropout; BFloat16 autocast`.
GRADACCUM_INLINE std::string StepModel::text(const StepModes& modes) const {
  std::string text = modes.training.front() ? "training" : "evaluation";
  for (std::size_t i = 1; i < modules_.size(); ++i)
    if (modes.training[i] != modes.training.front()) text += " but " + modules_[i].first;
  return text + "; " + (modes.autocast ? c10::toString(*modes.autocast) : "no") + " autocast";
}

GRADACCUM_INLINE bool StepModel::unchanged() const {
  return std::ranges::all_of(seen_, [](const Seen& seen) {
    const auto& tensor = seen.tensor;
    return tensor.is_cpu() && tensor.scalar_type() == seen.dtype && tensor.requires_grad() == seen.learned &&
           tensor.sizes() == at::IntArrayRef(seen.sizes) && tensor.strides() == at::IntArrayRef(seen.strides);
  });
}

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

GRADACCUM_INLINE TrialResult StepTrial::result(c10::function_ref<Loss()> run) const {
  return result([&](std::vector<at::Tensor>& gradients) {
    auto loss = run();
    loss.check();
    std::vector<at::Tensor> learned;
    for (auto& parameter : model_.parameters)
      if (parameter.requires_grad()) learned.push_back(parameter);
    const auto computed = torch::autograd::grad({loss.mean}, learned, {}, /*retain_graph=*/false,
                                                /*create_graph=*/false, /*allow_unused=*/true);
    auto next = computed.begin();
    for (auto& parameter : model_.parameters) gradients.push_back(parameter.requires_grad() ? *next++ : at::Tensor());
    return loss;
  });
}

GRADACCUM_INLINE TrialResult StepTrial::result(c10::function_ref<Loss(std::vector<at::Tensor>&)> run) const {
  begin_.put_back();
  std::vector<at::Tensor> gradients;
  auto loss = run(gradients);
  return {std::move(loss), std::move(gradients), copies_of(model_.buffers), RandomState()};
}

GRADACCUM_INLINE double norm_in_double(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.numel() == 0 ? 0 : at::linalg_vector_norm(tensor.to(at::kDouble)).item<double>();
}

/// The tolerance for a sum of products, relative to its norm: several thousand roundings.
GRADACCUM_INLINE double tolerance_of(const StepModel& model) {
  auto coarsest = model.parameters.front().scalar_type();
  for (auto& parameter : model.parameters)
    if (c10::elementSize(parameter.scalar_type()) < c10::elementSize(coarsest)) coarsest = parameter.scalar_type();
  if (const auto autocast = model.modes().autocast) coarsest = *autocast;
  if (c10::elementSize(coarsest) == 2) return 0.1;
  return coarsest == at::kDouble ? 1e-9 : 1e-3;
}

/// Compares tensors by the norm of their difference.
class Differences {
 public:
  explicit Differences(double tolerance) : tolerance_(tolerance) {}

  /// Compares two tensors, relative to the norm of `wanted`, or to `scale` if that is larger.
  void compare(const std::string& what, const at::Tensor& wanted, const at::Tensor& got, double scale) {
    if (!text_.empty()) return;
    if (wanted.defined() != got.defined()) {
      text_ = what + (wanted.defined() ? " is missing" : " should not be there");
    } else if (wanted.defined()) {
      const auto norm = std::max(norm_in_double(wanted), scale), off = norm_in_double(wanted - got);
      const bool alike = off <= tolerance_ * norm || (!std::isfinite(norm) && !std::isfinite(norm_in_double(got)));
      if (!alike) text_ = c10::str(what, " differs by ", off / norm, " of its norm");
    }
  }
  const std::string& text() const { return text_; }
  double tolerance() const { return tolerance_; }

 private:
  double tolerance_;
  std::string text_;
};

GRADACCUM_INLINE std::string difference_of_steps(const StepModel& model, const TrialResult& wanted,
                                                 const TrialResult& got) {
  Differences differences(tolerance_of(model));
  differences.compare("the loss", wanted.loss.mean.detach(), got.loss.mean.detach().reshape_as(wanted.loss.mean), 0);
  if (wanted.loss.items != got.loss.items)
    return c10::str("the loss is of ", got.loss.items, " items, not ", wanted.loss.items);
  differences.compare("the output", wanted.loss.output, got.loss.output, 0);
  double norm = 0;
  for (auto& gradient : wanted.gradients)
    if (gradient.defined()) norm = std::hypot(norm, norm_in_double(gradient));
  for (std::size_t i = 0; i < model.parameters.size(); ++i)  // a gradient that cancels may be mere rounding
    differences.compare("the gradient of " + model.parameter_names[i], wanted.gradients[i], got.gradients[i],
                        std::sqrt(differences.tolerance()) * norm);
  for (std::size_t i = 0; i < model.buffers.size(); ++i)
    differences.compare("the buffer " + model.buffer_names[i], wanted.buffers[i], got.buffers[i], 0);
  if (differences.text().empty() && !(wanted.random == got.random)) return "random numbers were drawn otherwise";
  return differences.text();
}

inline thread_local std::string* host_reads = nullptr;  // receives the name of an operation that reads a value

/// Records the last operation of a scope that reads a tensor's value on the host.
class [[nodiscard]] HostReadScope {
 public:
  explicit HostReadScope(std::string& noted) {
    host_reads = &noted;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          const std::string_view name = function.name();
          if (name == "aten::_local_scalar_dense" || name == "aten::equal") *host_reads = name;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  HostReadScope(const HostReadScope&) = delete;
  HostReadScope& operator=(const HostReadScope&) = delete;
  ~HostReadScope() { at::removeCallback(handle_); }

 private:
  at::CallbackHandle handle_;
};

/// Disables autocast's cache for a scope, since a cached cast would become a constant.
class [[nodiscard]] NoCastsKeptScope {
 public:
  NoCastsKeptScope() { at::autocast::set_autocast_cache_enabled(false); }
  NoCastsKeptScope(const NoCastsKeptScope&) = delete;
  NoCastsKeptScope& operator=(const NoCastsKeptScope&) = delete;
  ~NoCastsKeptScope() { at::autocast::set_autocast_cache_enabled(before_); }

 private:
  bool before_ = at::autocast::is_autocast_cache_enabled();
};

GRADACCUM_INLINE torch::jit::Stack inputs_of(const StepModel& model, const std::vector<at::Tensor>& batch) {
  torch::jit::Stack inputs;
  for (const auto* const tensors : {&model.parameters, &model.buffers, &batch})
    for (auto& tensor : *tensors)
      if (tensor.defined()) inputs.emplace_back(tensor);
  return inputs;
}

/// Packs a loss as a script returns it.
GRADACCUM_INLINE torch::jit::Stack outputs_of(const Loss& loss, const std::vector<at::Tensor>& batch) {
  std::vector<c10::IValue> outputs{loss.mean};
  if (loss.output.defined()) outputs.emplace_back(loss.output);
  const bool given = std::ranges::any_of(batch, [&](auto& tensor) { return tensor.is_same(loss.target); });
  if (loss.target.defined() && !given) outputs.emplace_back(loss.target);
  return {c10::ivalue::Tuple::create(std::move(outputs))};
}

GRADACCUM_INLINE std::string text_without_shapes(torch::jit::Graph& graph) {
  const auto bare = graph.copy();
  torch::jit::EraseShapeInformation(bare);
  return bare->toString(/*print_source_locations=*/false);
}

/// Throws if a constant is a tensor from before the recorded pass. Tensors that the pass made from numbers may stay.
GRADACCUM_INLINE void check_no_constants(const torch::jit::Graph& graph, const AllocationLog& made) {
  for (const auto* const node : graph.nodes()) {
    if (node->kind() != c10::prim::Constant || !node->hasAttribute(c10::attr::value) ||
        node->kindOf(c10::attr::value) != torch::jit::AttributeKind::t)
      continue;
    const auto tensor = node->t(c10::attr::value);
    TORCH_CHECK(tensor.numel() == 0 || made.has(tensor),
                "save_step: the objective uses a tensor that is neither of the model nor of the ", "batch, ",
                layout_text(tensor), ", and the compiled step would keep it as it is now: register it as a ",
                "buffer, or say that it never changes by {.constants = true}");
  }
}

GRADACCUM_INLINE double rows_of_batch(const std::vector<at::Tensor>& batch) {
  return batch.empty() || !batch.front().defined() || batch.front().dim() == 0
             ? 1
             : static_cast<double>(batch.front().size(0));
}

GRADACCUM_INLINE StepTrace trace_of(const StepModel& model, const StepCall& call, bool constants) {
  StepTrace trace;
  std::string read;
  torch::jit::Module module("step");
  const NoCastsKeptScope no_casts_kept;
  const AllocationScope made("save_step: must not record inside LibTorch's profiler, which uses the same slot");
  const auto traced = [&] {
    const HostReadScope scope(read);
    return torch::jit::tracer::trace(
        inputs_of(model, call.batch),
        [&](const torch::jit::Stack&) {
          trace.loss = call.objective();
          trace.loss.check();
          return outputs_of(trace.loss, call.batch);
        },
        [](const at::Tensor&) { return std::string(); }, /*strict=*/true, /*force_outplace=*/false, &module);
  }();
  TORCH_CHECK(read.empty(),
              "save_step: the objective must not read a value on the host (item(), or a comparison), got ", read,
              ": the compiled step would go on with the value of this batch. Keep it a tensor (torch::where), or "
              "read it outside of the objective");
  const auto& graph = traced.first->graph;
  if (!constants) check_no_constants(*graph, *made);
  TORCH_CHECK(trace.loss.items > 0, "save_step: the batch must have items, got ", trace.loss.items);
  TORCH_CHECK(
      call.tensors_alone || trace.loss.items == 1 || trace.loss.items == rows_of_batch(call.batch),
      "save_step: the loss must be of as many items as the batch has rows, or of 1, got ", trace.loss.items,
      ": a number that a batch holds would be one for ever; weigh what the step gives: ga::Loss{step(batch).mean, "
      "batch.tokens}");
  trace.operations = text_without_shapes(*graph);
  module.type()->addMethod(module._ivalue()->compilation_unit()->create_function(
      c10::QualifiedName(*module.type()->name(), "forward"), graph));
  std::ostringstream file;
  module.save(file);
  trace.script = std::move(file).str();
  return trace;
}

GRADACCUM_INLINE Loss replayed(const std::string& script, const StepModel& model, const std::vector<at::Tensor>& batch,
                               const Loss& traced) {
  std::istringstream file(script);
  auto module = torch::jit::load(file);
  const auto outputs = module.forward(inputs_of(model, batch)).toTuple();
  Loss loss(outputs->elements()[0].toTensor(), traced.items);
  if (traced.output.defined()) loss.output = outputs->elements()[1].toTensor();
  return loss;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
