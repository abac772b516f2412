// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_trace.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/allocation_log.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/passes/shape_analysis.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string_view>

namespace gradaccum::detail {

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
