// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/save_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/compilation/step_result.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/manifest.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <ostream>
#include <stdexcept>
#include <utility>

namespace gradaccum {

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
