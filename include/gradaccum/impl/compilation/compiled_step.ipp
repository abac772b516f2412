// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/compiled_step.hpp>
#include <gradaccum/detail/compilation/step_source.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/safetensors_header.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/version.hpp>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include <dlfcn.h>
#include <algorithm>
#include <cmath>
#include <ostream>
#include <stdexcept>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const CompiledStepReport& report) {
  stream << report.compiled << " of " << report.compiled + report.eager << " steps compiled\n";
  for (auto& [why, count] : report.why_eager) stream << count << " not: " << why << '\n';
  return stream;
}

namespace detail {

/// The reason for a graph of these rows only; empty if there is one for any number.
GRADACCUM_INLINE std::string why_these_rows(const StepTrial& trial, const StepModel& model, const StepCalls& calls,
                                            const StepTrace& trace, const SaveStepOptions& options) {
  if (!options.any_rows) return ".any_rows is false";
  if (!calls.of_a_row_less) return "its tensors have not as many rows each, or fewer than 3";
  StepTrace other;
  trial.result([&](auto&) {
    other = trace_of(model, *calls.of_a_row_less, options.constants);
    return other.loss;
  });
  const auto rows = static_cast<double>(calls.call.batch.front().size(0));
  const bool counts_rows = trace.loss.items == rows && other.loss.items == rows - 1;
  if (trace.operations == other.operations && (trace.loss.items == other.loss.items || counts_rows)) return "";
  return "the objective computes with the number of rows in C++, where it is a number and not a tensor's size";
}

GRADACCUM_INLINE std::int64_t place_of_target(const Loss& loss, const std::vector<at::Tensor>& batch) {
  if (!loss.target.defined()) return GraphDescription::no_target;
  for (std::size_t i = 0; i < batch.size(); ++i)
    if (batch[i].is_same(loss.target)) return static_cast<std::int64_t>(i);
  return GraphDescription::computed_target;
}

/// Records steps, checks them against the objective, and writes them to a folder.
class StepSaver {
 public:
  StepSaver(torch::nn::Module& module, const std::filesystem::path& folder, const SaveStepOptions& options)
      : model_(module), folder_(folder), options_(options), saved_{folder, {}, {}} {
    step_.model = model_.text();
    step_.modes = model_.text(model_.modes());
    TORCH_CHECK(model_.unchanged(), "save_step: the model must be on the CPU, got ", step_.model);
  }

  void add(const StepCalls& calls) {
    TORCH_CHECK(!calls.call.batch.empty(), "save_step: the batch must have tensors, and none were found in it");
    const StepTrial trial(model_);
    const auto eager = trial.result(calls.call.objective);
    StepTrace trace;
    trial.result([&](auto&) {
      trace = trace_of(model_, calls.call, options_.constants);
      return trace.loss;
    });
    const auto again = trial.result([&] { return replayed(trace.script, model_, calls.call.batch, trace.loss); });
    const auto wrong = difference_of_steps(model_, eager, again);
    TORCH_CHECK(wrong.empty(), "save_step: what was recorded must be what the objective does, but ", wrong,
                ": an autograd::Function of one's own and a NoGradGuard in the objective cannot be recorded (write the "
                "first with operations that have a gradient, and detach() for the second)");
    const auto only_these_rows = why_these_rows(trial, model_, calls, trace, options_);
    if (saved_.only_these_rows.empty()) saved_.only_these_rows = only_these_rows;
    add(calls.call, trace, only_these_rows.empty());
  }

  /// Writes the folder. An old step there stays whole until the last file is written, and is then removed.
  SavedStep write() {
    auto manifest = manifest_of(step_);
    check_folder();
    make_directory(folder_);
    for (std::size_t i = 0; i < scripts_.size(); ++i)
      replace_file(folder_ / step_.graphs[i].trace, [&](OutputFile& file) {
        file.write(scripts_[i].data(), scripts_[i].size());
        manifest.files[step_.graphs[i].trace] = {file.bytes(), file.crc32()};
      });
    const auto text = text_of(manifest);
    replace_file(folder_ / manifest_name, [&](OutputFile& file) { file.write(text.data(), text.size()); });
    for (const auto& name : names_in(folder_))
      if (name.starts_with("graph-") && !manifest.files.contains(name)) std::filesystem::remove(folder_ / name);
    return saved_;
  }

 private:
  void add(const StepCall& call, StepTrace& trace, bool any_rows) {
    GraphDescription graph;
    graph.batch = layout_text(call.batch);
    if (any_rows) graph.any_rows = layout_text(call.batch, true);
    graph.items = trace.loss.items;
    if (any_rows && graph.items == static_cast<double>(call.batch.front().size(0)))
      graph.items = GraphDescription::items_are_rows;
    graph.output = trace.loss.output.defined();
    graph.target = place_of_target(trace.loss, call.batch);
    const auto crc = crc32_text(crc32(trace.script.data(), trace.script.size()));
    graph.trace = name_of_graph(step_.graphs.size()) + "." + crc + ".pt";
    saved_.batches.push_back(any_rows ? graph.any_rows : graph.batch);
    scripts_.push_back(std::move(trace.script));
    step_.graphs.push_back(std::move(graph));
  }

  void check_folder() const {
    const auto names = names_in(folder_);
    if (names.empty()) return;
    if (std::ranges::find(names, manifest_name) == names.end())
      throw std::runtime_error(folder_.string() + ": must be a new folder, or a saved step, and there are other files");
    static_cast<void>(read_manifest(folder_, step_format));
  }

  StepModel model_;
  std::filesystem::path folder_;
  SaveStepOptions options_;
  StepDescription step_;
  std::vector<std::string> scripts_;
  SavedStep saved_;
};

GRADACCUM_INLINE SavedStep save_steps(torch::nn::Module& module, const std::vector<StepCalls>& calls,
                                      const std::filesystem::path& folder, const SaveStepOptions& options) {
  TORCH_CHECK(!calls.empty(), "save_steps: there must be a batch");
  StepSaver saver(module, folder, options);
  for (auto& of_one : calls) saver.add(of_one);
  return saver.write();
}

}  // namespace detail

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const SavedStep& step) {
  stream << step.folder.string() << ": recorded a step of";
  for (std::size_t i = 0; i < step.batches.size(); ++i) stream << (i ? "; of " : " ") << step.batches[i];
  if (!step.only_these_rows.empty()) stream << "\nOnly of so many rows: " << step.only_these_rows;
  return stream << "\nCompile it: python3 tools/compile_step.py " << step.folder.string() << '\n';
}

}  // namespace gradaccum

namespace gradaccum::detail {

/// The functions that tools/compile_step.py makes code export, in this order. Returned strings are errors, or null.
struct StepCode::Functions {
  const char* (*create)(void** container);
  void (*destroy)(void* container);
  const char* (*run)(void* container, void** inputs, void** outputs);
  std::size_t (*inputs)(void* container);
  std::size_t (*outputs)(void* container);
};

GRADACCUM_INLINE StepCode::StepCode(void* const* functions) { start(functions); }

GRADACCUM_INLINE StepCode::StepCode(const std::filesystem::path& library, const std::string& name) {
  const auto path = std::filesystem::absolute(library);
  library_ = {dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), [](void* opened) {
                if (opened) dlclose(opened);
              }};
  if (!library_) throw std::runtime_error(path.string() + ": must be a library that can be loaded, got " + dlerror());
  const auto* const functions = dlsym(library_.get(), ("gradaccum_step_" + name).c_str());
  if (!functions)
    throw std::runtime_error(path.string() + ": must be the code " + name + " of a step, got " + dlerror());
  start(static_cast<void* const*>(functions));
}

GRADACCUM_INLINE void StepCode::start(void* const* functions) {
  functions_ = reinterpret_cast<const Functions*>(functions);
  void* container = nullptr;
  const auto* const error = functions_->create(&container);
  TORCH_CHECK(!error, "CompiledStep: the compiled code must start, got ", error);
  container_ = {container, [destroy = functions_->destroy, library = library_](void* old) { destroy(old); }};
  inputs_ = functions_->inputs(container);
  outputs_ = functions_->outputs(container);
}

GRADACCUM_INLINE std::vector<at::Tensor> StepCode::run(const std::vector<at::Tensor>& inputs) const {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<void*> given, got(outputs_);
  given.reserve(inputs.size());
  for (auto& tensor : inputs) given.push_back(new at::Tensor(tensor));  // the code deletes them, even on failure
  const auto* const error = functions_->run(container_.get(), given.data(), got.data());
  TORCH_CHECK(!error, "CompiledStep: the compiled code failed: ", error);
  std::vector<at::Tensor> outputs;
  outputs.reserve(got.size());
  for (auto* const output : got) {
    const std::unique_ptr<at::Tensor> tensor(static_cast<at::Tensor*>(output));
    outputs.push_back(std::move(*tensor));
  }
  return outputs;
}

/// Calls `visit(name, member)` for each member of a graph, by its name in a manifest. `Graph` may be const.
template <class Graph>
void for_each_member(Graph& graph, auto&& visit) {
  visit("batch", graph.batch);
  visit("any_rows", graph.any_rows);
  visit("items", graph.items);
  visit("output", graph.output);
  visit("target", graph.target);
  visit("trace", graph.trace);
  visit("code", graph.code);
  visit("gradients", graph.gradients);
  visit("moved", graph.moved);
  visit("capability", graph.capability);
}

GRADACCUM_INLINE std::string name_of_graph(std::size_t number) { return "graph-" + std::to_string(number); }

GRADACCUM_INLINE std::string library_of_graph(std::size_t number, const GraphDescription& graph) {
  return name_of_graph(number) + "." + graph.code + ".so";
}

GRADACCUM_INLINE Manifest manifest_of(const StepDescription& step) {
  Manifest manifest;
  manifest.format = step_format;
  manifest.gradaccum = c10::str(GRADACCUM_VERSION_MAJOR, ".", GRADACCUM_VERSION_MINOR, ".", GRADACCUM_VERSION_PATCH);
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

/// Reads the values of a manifest by name and type.
class StepReader {
 public:
  StepReader(const Manifest& manifest, const std::string& what) : manifest_(manifest), what_(what) {}

  template <class Value>
  Value value(const std::string& name) const {
    const auto found = manifest_.values.find(name);
    if (found == manifest_.values.end()) fail("must have a value " + in_quotes(name));
    const auto* const value = std::get_if<Value>(&found->second);
    if (!value) fail("the value " + in_quotes(name) + " must be of another type");
    return *value;
  }

  GraphDescription graph(const std::string& graph_name) const {
    GraphDescription graph;
    for_each_member(graph, [&]<class Value>(const std::string& name, Value& member) {
      member = value<Value>(graph_name + "." + name);
    });
    if (!graph.code.empty() && graph.code.find_first_not_of("0123456789abcdef") != std::string::npos)
      fail("the code of " + graph_name + " must be a name of digits 0-9 a-f, got " + in_quotes(graph.code));
    if (!(std::isfinite(graph.items) && graph.items >= 0)) fail("the items of " + graph_name + " must be >= 0");
    return graph;
  }

  [[noreturn]] void fail(const std::string& requirement) const { throw std::runtime_error(what_ + ": " + requirement); }

 private:
  const Manifest& manifest_;
  const std::string& what_;
};

GRADACCUM_INLINE StepDescription step_description(const Manifest& manifest, const std::string& what) {
  const StepReader reader(manifest, what);
  StepDescription step;
  step.model = reader.value<std::string>("model");
  step.modes = reader.value<std::string>("modes");
  const auto graphs = reader.value<std::int64_t>("graphs");
  if (graphs < 1 || static_cast<std::size_t>(graphs) > manifest.values.size())
    reader.fail("the number of graphs must fit its values, got " + std::to_string(graphs));
  for (std::int64_t i = 0; i < graphs; ++i)
    step.graphs.push_back(reader.graph(name_of_graph(static_cast<std::size_t>(i))));
  return step;
}

GRADACCUM_INLINE std::map<std::string, StepInProgram>& steps_in_program() {
  static std::map<std::string, StepInProgram> steps;
  return steps;
}

GRADACCUM_INLINE StepSource::StepSource(const std::filesystem::path& folder)
    : name_((folder / manifest_name).string()), manifest_(read_manifest(folder, step_format)), folder_(folder) {}

GRADACCUM_INLINE StepSource::StepSource(const std::string& name_in_program) : name_(name_in_program) {
  const auto found = steps_in_program().find(name_in_program);
  if (found == steps_in_program().end()) {
    std::string names;
    for (auto& [name, step] : steps_in_program()) names += " " + name;
    TORCH_CHECK(false, "CompiledStep: InProgram{\"", name_in_program, "\"} must be a step that gradaccum_compile_step ",
                "built into this program, which has", names.empty() ? " none" : names);
  }
  in_program_ = &found->second;
  manifest_ = manifest_of(in_program_->manifest, name_, step_format);
}

GRADACCUM_INLINE StepCode StepSource::code(std::size_t number, const GraphDescription& graph) const {
  if (in_program_) {
    const auto found = in_program_->code.find(graph.code);
    if (found == in_program_->code.end())
      throw std::runtime_error(name_ + ": the program must have its code " + graph.code);
    return StepCode(found->second);
  }
  const auto file = library_of_graph(number, graph);
  const auto listed = manifest_.files.find(file);
  if (listed == manifest_.files.end()) throw std::runtime_error(name_ + ": must list the file " + file);
  check_file(folder_ / file, listed->second);
  return StepCode(folder_ / file, graph.code);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
