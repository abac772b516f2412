// SPDX-License-Identifier: Apache-2.0
// Records a training step, checks its compiled code against the objective, and runs the code instead.
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/flop_counter.hpp>
#include <gradaccum/graphed_step.hpp>

#include <gradaccum/detail/compilation/device_graph.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/types/uncounted.hpp>
#include <gradaccum/impl/compilation/step_graphs.ipp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/library.h>

#include <clocale>
#include <locale>
#include <ostream>
#include <string_view>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Distinguishes a different program from rounding.
class StepComparison {
 public:
  /// Compares the objective of a batch with `other`, which runs code that should do the same.
  StepComparison(const StepTrial& trial, const StepModel& model, const std::vector<at::Tensor>& batch,
                 c10::function_ref<Loss()> objective, c10::function_ref<TrialResult()> other)
      : trial_(trial), model_(model), inputs_(model.parameters), objective_(objective), other_(other) {
    inputs_.insert(inputs_.end(), batch.begin(), batch.end());
    auto found = differences();
    if (std::ranges::all_of(found, [](auto& difference) { return difference.sum.defined(); }) && !found.empty()) {
      const auto first = trial_.result(objective_);
      const auto twice = differences_of_steps(model_, first, trial_.result(objective_));
      repeats = twice.empty();
      if (!repeats) {
        wrong = twice.front().text() + " from one run of the objective to the next";
        return;
      }
      try {
        found = differences_elsewhere();
      } catch (const std::exception& error) {
        doubt = found.front().text() + ", and other inputs fail: " + error.what();
        return;
      }
    }
    for (auto& difference : found) {
      if (wrong.empty() && !(difference.shared() < 0.8)) wrong = difference.text();
      const auto by_rounding = tolerance_ < 0.1 ? std::sqrt(tolerance_) : 0;  // for an element on a bound
      if (difference.shared() > 0.5 || difference.size() > by_rounding) doubt = difference.text();
    }
  }

  std::string wrong, doubt;  ///< certain and possible differences of programs
  bool repeats = true;       ///< false if two runs of the objective differ

 private:
  static bool holds_floats(const at::Tensor& tensor) {
    return tensor.is_floating_point() && tensor.is_non_overlapping_and_dense();
  }

  std::vector<StepDifference> differences() {
    const auto wanted =
        std::exchange(is_counted_, true) ? trial_.result(objective_) : trial_.counted_result(objective_);
    const auto got = other_();
    tolerance_ = wanted.tolerance;
    auto found = differences_of_steps(model_, wanted, got);
    if (found.empty() || tolerance_ < 0.1) return found;
    const ExchangedTensors in_float(inputs_, [](const at::Tensor& tensor) {
      return holds_floats(tensor) && tensor.element_size() == 2 ? tensor.to(at::kFloat) : at::Tensor();
    });
    const auto device = model_.device().value_or(at::kCPU).type();
    const Autocast scope(device, {}, /*enabled=*/false);
    at::autocast::set_autocast_dtype(device, at::kFloat);
    at::autocast::set_autocast_enabled(device, true);
    try {
      const auto exact = trial_.result(objective_);
      // With other random numbers, float32 is another function.
      return exact.random == wanted.random ? differences_of_steps(model_, wanted, got, &exact) : found;
    } catch (const std::exception&) {
      return found;  // the objective requires 16 bits
    }
  }

  /// Returns the differences that most of several sets of inputs show. The sets are variations of the current inputs.
  ///
  /// Rounding occasionally moves an element across the threshold of a ReLU or max-pool, which changes gradients by much
  /// more than rounding does. With other inputs, that affects another element or none, but a different program differs
  /// for all inputs in the same way.
  std::vector<StepDifference> differences_elsewhere() {
    constexpr int sets = 7;
    // Large enough to round differently, small enough that a different program keeps its difference.
    const double part = tolerance_ < 0.1 ? tolerance_ / 100 : tolerance_;
    std::vector<StepDifference> all;
    for (int set = 0, agreeing = 0; set < sets && 2 * agreeing < sets; ++set) {
      auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(set));
      // Moves toward 0, since the objective may have bounds. Every other set leaves the batch as it is, since its
      // numbers may have to be exact.
      const ExchangedTensors moved(set % 2 ? inputs_ : model_.parameters, [&](const at::Tensor& tensor) {
        if (!holds_floats(tensor)) return at::Tensor();
        const auto factors = at::empty_like(tensor, at::TensorOptions(at::kCPU)).uniform_(1 - part, 1, random);
        return factors.to(tensor.device()).mul_(tensor);
      });
      auto found = differences();
      agreeing += found.empty();
      for (auto& difference : found) {
        const auto same = std::ranges::find(all, difference.what, &StepDifference::what);
        if (same == all.end()) {
          all.push_back(std::move(difference));
          continue;
        }
        if (same->sum.defined()) same->sum += difference.sum;
        same->squares += difference.squares;
        same->norm = std::max(same->norm, difference.norm);
        ++same->sets;
      }
    }
    std::erase_if(all, [](const StepDifference& difference) { return 2 * difference.sets < sets; });
    return all;
  }

  const StepTrial& trial_;
  const StepModel& model_;
  std::vector<at::Tensor> inputs_;  // the parameters and the batch
  c10::function_ref<Loss()> objective_;
  c10::function_ref<TrialResult()> other_;
  double tolerance_ = 0;
  bool is_counted_ = false;  // by a FlopCounter, in the first comparison
};

/// A graph's operations and constants as a text, to compare two traces.
///
/// Leaves out what differs between traces of one program: the index of a device, cuDNN's settings, which LibTorch reads
/// when a convolution is called, and `contiguous`, which is recorded only if it copies.
class OperationsText {
 public:
  explicit OperationsText(const torch::jit::Graph& graph) {
    text_.imbue(std::locale::classic());  // others write 1,000
    for (const auto* const input : graph.inputs()) number(input);
    add(*graph.block());
  }
  std::string text() const { return text_.str(); }

 private:
  void number(const torch::jit::Value* value) { numbers_.emplace(value, next_++); }

  void add(const torch::jit::Block& block) {
    for (const auto* const node : block.nodes()) {
      if (node->kind() == c10::prim::Constant) continue;
      if (const auto same = numbers_.find(node->kind() == c10::aten::contiguous ? node->input(0) : nullptr);
          same != numbers_.end()) {
        numbers_.emplace(node->output(), same->second);
        continue;
      }
      text_ << node->kind().toQualString();
      const bool convolution = node->kind() == c10::aten::_convolution;  // from the tenth, inputs are cuDNN's settings
      for (const auto* const input : convolution ? node->inputs().slice(0, 9) : node->inputs()) add(*input);
      text_ << '\n';
      for (const auto* const output : node->outputs()) number(output);
      for (const auto* const inner : node->blocks()) add(*inner);
    }
    for (const auto* const output : block.outputs()) add(*output);
    text_ << '\n';
  }

  void add(const torch::jit::Value& value) {
    const auto constant = torch::jit::toIValue(&value);
    if (!constant)
      text_ << " %" << numbers_.at(&value);
    else if (constant->isDevice())
      text_ << ' ' << constant->toDevice().type();
    else if (constant->isTensor() && constant->toTensor().defined())
      text_ << ' ' << constant->toTensor().toString() << constant->toTensor().sizes() << ' '
            << crc_of_elements(constant->toTensor());
    else
      text_ << ' ' << *constant;
  }

  static std::uint32_t crc_of_elements(const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided) return 0;
    const auto elements = tensor.detach().cpu().contiguous();
    return crc32(elements.const_data_ptr(), elements.nbytes());
  }

  std::ostringstream text_;
  std::map<const torch::jit::Value*, std::size_t> numbers_;
  std::size_t next_ = 0;
};

/// A forward pass as a graph: a function of parameters, buffers and the batch's tensors, in this order. It returns the
/// loss, and its output and target if it has them.
struct StepTrace {
  torch::jit::Module module{"step"};
  std::shared_ptr<torch::jit::Graph> graph;
  std::string operations;   ///< `OperationsText` of the graph
  Loss loss{at::Tensor()};  ///< values of the traced run
};

/// Packs a loss as a script returns it: in a list, because Python reads the sizes of a tuple's tensors, and a graph for
/// any number of rows would then be for this number.
GRADACCUM_INLINE torch::jit::Stack outputs_of(const Loss& loss, const std::vector<at::Tensor>& batch) {
  std::vector<at::Tensor> outputs{loss.mean};
  if (loss.output.defined()) outputs.push_back(loss.output);
  if (index_of_target(loss, batch) == GraphDescription::computed_target) outputs.push_back(loss.target);
  return {outputs};
}

/// Throws if a constant is a tensor from before the recorded pass. Tensors that the pass made from numbers may stay.
GRADACCUM_INLINE void check_no_constants(const torch::jit::Graph& graph, const AllocationLog& made) {
  for (const auto* const node : graph.nodes()) {
    if (node->kind() != c10::prim::Constant || !node->hasAttribute(c10::attr::value) ||
        node->kindOf(c10::attr::value) != torch::jit::AttributeKind::t)
      continue;
    const auto tensor = node->t(c10::attr::value);
    TORCH_CHECK(tensor.numel() == 0 || made.has(tensor),
                "save_step: the objective uses a tensor that belongs neither to the model nor to the ", "batch, ",
                layout_text(tensor), ", and the compiled step would keep its present value: register it as a ",
                "buffer, or pass {.constants = true} if it never changes");
  }
}

/// Finds reads of values on the host, whose results would become constants. An operation that is recorded whole may
/// read them, as every step runs it again.
///
/// Allows nn::MultiheadAttention to compare query and key, then key and value: for one tensor the answer is known, and
/// the branch for different tensors is right for equal ones, too.
class HostReads {
 public:
  explicit HostReads(bool attention) : attention_(attention) {
    // Every operation passes this key, whose kernels, unlike a RecordFunction, see tensors in all kinds of builds. It
    // stays registered: another thread may be comparing.
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    [[maybe_unused]] static const auto& once = library.impl("equal", [](const at::Tensor& a, const at::Tensor& b) {
      const c10::impl::ExcludeDispatchKeyGuard past_this(c10::DispatchKey::BackendSelect);
      const bool equal = at::equal(a, b);
      if (current && torch::jit::tracer::isTracing()) current->compared(a, b, equal);
      return equal;
    });
    current = this;
  }
  HostReads& operator=(HostReads&&) = delete;
  ~HostReads() {
    current = nullptr;
    at::removeCallback(handle_);
  }

  /// Returns the operation that the objective called to read a value; empty if there is none.
  std::string found() const { return found_.empty() && pending_ ? "aten::equal" : found_; }

 private:
  static inline thread_local HostReads* current = nullptr;

  static bool one_view(const at::Tensor& a, const at::Tensor& b) {
    return a.is_same(b) ||
           (a.has_storage() && b.has_storage() && a.is_alias_of(b) && a.dtype() == b.dtype() &&
            a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides());
  }

  void begin(const std::string_view name) {
    if (depth_++ == 0) {
      outermost_ = name;
      if (name != "aten::equal") {
        found_ = found();
        compared_.clear();
        paired_ = false;
      }
    }
    if (name == "aten::_local_scalar_dense" && torch::jit::tracer::isTracing() && outermost_ != "aten::equal")
      found_ = outermost_;
  }

  void compared(const at::Tensor& a, const at::Tensor& b, bool equal) {
    const bool known = one_view(a, b),
               follows = attention_ && pending_ &&
                         (one_view(compared_[1], a) || (one_view(compared_[0], a) && one_view(compared_[1], b)));
    if (paired_ || (pending_ && !follows) || (equal && !known)) found_ = "aten::equal";
    pending_ = !known && !follows;
    paired_ = follows;
    compared_ = {a, b};
  }

  const bool attention_;
  int depth_ = 0;
  std::string outermost_, found_;
  std::vector<at::Tensor> compared_;  // by the last operation, if that was `equal`
  bool pending_ = false;              // two were not equal: the attention would compare once more
  bool paired_ = false;               // it has, and would not compare a third time
  const at::CallbackHandle handle_ =
      at::addThreadLocalCallback(at::RecordFunctionCallback(
                                     [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
                                       if (current) current->begin(function.name());  // null in other threads
                                       return nullptr;
                                     },
                                     [](const at::RecordFunction&, at::ObserverContext*) {
                                       if (current) --current->depth_;
                                     })
                                     .scopes({at::RecordScope::FUNCTION}));
};

/// Runs the objective once, and records its operations.
///
/// Throws `c10::Error` if the objective reads a value on the host, which would become a constant. Throws, too, if it
/// uses a tensor that belongs neither to the model nor to the batch, unless `constants` allows that.
GRADACCUM_INLINE StepTrace trace_of(const StepModel& model, const StepCall& call, bool constants) {
  StepTrace trace;
  std::string read;
  const bool cached = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(false);  // a cached cast would become a constant
  const auto restore = c10::make_scope_exit([cached] { at::autocast::set_autocast_cache_enabled(cached); });
  std::optional<AllocationScope> made;
  if (!constants) made.emplace("save_step: must not record inside LibTorch's profiler, which uses the same hook");
  const auto traced = [&] {
    try {
      const HostReads reads(model.attends());
      const auto inputs = inputs_of(model, call.batch);
      const auto keep = c10::make_scope_exit([&] { read = reads.found(); });
      return torch::jit::tracer::trace(
          torch::jit::Stack(inputs.begin(), inputs.end()),
          [&](const torch::jit::Stack&) {
            trace.loss = call.objective();
            trace.loss.check();
            return outputs_of(trace.loss, call.batch);
          },
          [](const at::Tensor&) { return std::string(); }, /*strict=*/false, /*force_outplace=*/false, &trace.module);
    } catch (const c10::Error& error) {  // its text lists all elements of the tensor
      const std::string_view text(error.what_without_backtrace());
      TORCH_CHECK(text.find("requires grad as a constant") == std::string_view::npos,
                  "save_step: the objective must not use a tensor that requires grad and is not a parameter, nor "
                  "autograd::grad with create_graph (a gradient penalty): neither can be recorded; detach the tensor, "
                  "or train with such a loss without a CompiledStep");
      throw;
    }
  }();
  TORCH_CHECK(read.empty(),
              "save_step: the objective must not read a value on the host (item(), or a comparison), got ", read,
              ": the compiled step would keep this batch's value. Keep it a tensor (torch::where), or read it outside "
              "the objective",
              read == "aten::equal" ? "; pass nn::MultiheadAttention the same tensor, not copies" : "");
  trace.graph = traced.first->graph;
  if (made) check_no_constants(*trace.graph, **made);
  TORCH_CHECK(trace.loss.items > 0, "save_step: the loss's items must be > 0, got ", trace.loss.items);
  const auto rows = call.batch.empty() ? 1 : static_cast<double>(samples_of(call.batch.front()));
  TORCH_CHECK(call.tensors_alone || trace.loss.items == 1 || trace.loss.items == rows,
              "save_step: the loss's items must be 1 or the batch's number of rows, got ", trace.loss.items,
              ": a number from the batch would become a constant; weight the step's result instead: "
              "ga::Loss{step(batch).mean, batch.tokens}");
  trace.operations = OperationsText(*trace.graph).text();
  return trace;
}

/// Records the operations in a pass of a trial.
GRADACCUM_INLINE StepTrace trace_of(const StepTrial& trial, const StepModel& model, const StepCall& call,
                                    bool constants) {
  StepTrace trace;
  trial.result([&](auto&) {
    trace = trace_of(model, call, constants);
    return trace.loss;
  });
  return trace;
}

/// Returns the contents of a TorchScript file with a graph.
GRADACCUM_INLINE std::string script_of(const StepTrace& trace) {
  const std::string locale_of_c = std::setlocale(LC_ALL, nullptr);
  const auto locale = std::locale::global(std::locale::classic());
  const auto as_before = c10::make_scope_exit([&]() noexcept {
    std::locale::global(locale);
    std::setlocale(LC_ALL, locale_of_c.c_str());
  });
  trace.module.type()->addMethod(trace.module._ivalue()->compilation_unit()->create_function(
      c10::QualifiedName(*trace.module.type()->name(), "forward"), trace.graph));
  std::ostringstream file;
  trace.module.save(file);
  return std::move(file).str();
}

/// Runs the script with operations that autograd records.
GRADACCUM_INLINE Loss replayed(const std::string& script, const StepModel& model, const std::vector<at::Tensor>& batch,
                               const Loss& traced) {
  std::istringstream file(script);
  auto module = torch::jit::load(file);
  const auto inputs = inputs_of(model, batch);
  const auto outputs = module.forward(torch::jit::Stack(inputs.begin(), inputs.end())).toTensorVector();
  Loss loss(outputs[0], traced.items);
  if (traced.output.defined()) loss.output = outputs[1];
  return loss;
}

/// Returns why a graph is only for this number of rows; empty if it is for any number.
GRADACCUM_INLINE std::string why_these_rows(const StepTrial& trial, const StepModel& model, const StepCalls& calls,
                                            const StepTrace& trace, const SaveStepOptions& options) {
  if (!options.any_rows) return ".any_rows is false";
  if (!calls.of_a_row_less) return "its tensors have not as many rows each, or fewer than 3";
  StepTrace other;
  try {
    other = trace_of(trial, model, *calls.of_a_row_less, options.constants);
  } catch (const std::exception& error) {
    return "the objective throws for a row less: " + first_line(error.what());
  }
  const auto rows = static_cast<double>(calls.call.batch.front().size(0));
  const bool counts_rows = trace.loss.items == rows && other.loss.items == rows - 1;
  if (trace.operations == other.operations && (trace.loss.items == other.loss.items || counts_rows)) return "";
  return "the objective computes with the number of rows in C++, where it is a number and not a tensor's size";
}

/// Returns the settings by which LibTorch chooses kernels, so that the compiler chooses the same.
GRADACCUM_INLINE std::string settings_text() {
  const auto& of = at::globalContext();
  return plain_text(of.userEnabledFlashSDP() ? "flash_sdp " : "", of.userEnabledMathSDP() ? "math_sdp " : "",
                    of.userEnabledMemEfficientSDP() ? "mem_efficient_sdp " : "",
                    of.userEnabledCuDNNSDP() ? "cudnn_sdp " : "", of.deterministicAlgorithms() ? "deterministic " : "");
}

/// Records steps, checks them against the objective, and writes them to a folder.
class StepSaver {
 public:
  StepSaver(torch::nn::Module& module, const std::filesystem::path& folder, const SaveStepOptions& options)
      : model_(module), folder_(folder), options_(options), saved_{folder, {}, {}} {
    step_.model = model_.text();
    step_.modes = model_.text(model_.modes());
    TORCH_CHECK(model_.device(), "save_step: the model must be on one device, a CPU or a CUDA device, got ",
                step_.model);
  }

  void add(const StepCalls& calls) {
    TORCH_CHECK(!calls.call.batch.empty(), "save_step: the batch must have tensors, but none were found in it");
    const StepTrial trial(model_);
    trial.result(calls.call.objective);
    const auto traced = [&] { return trace_of(trial, model_, calls.call, options_.constants); };
    const auto trace = traced();
    const auto script = script_of(trace);
    const StepComparison comparison(trial, model_, calls.call.batch, calls.call.objective, [&] {
      return trial.result([&] { return replayed(script, model_, calls.call.batch, trace.loss); });
    });
    TORCH_CHECK(comparison.wrong.empty(), "save_step: the recorded step must do what the objective does, but ",
                comparison.wrong,
                comparison.repeats
                    ? ": a custom autograd::Function or a NoGradGuard in the objective cannot be recorded (use "
                      "differentiable operations instead of the first, and detach() instead of the second)"
                    : ": pass what changes between runs as a tensor of the batch, and draw random numbers from "
                      "LibTorch's generator");
    // The comparison above does not see a number that changes slowly.
    TORCH_CHECK(trace.operations == traced().operations,
                "save_step: the objective must compute with the same numbers in every run, but a number of C++ changes "
                "from one run to the next: pass what changes between runs as a tensor of the batch");
    const auto only_these_rows = why_these_rows(trial, model_, calls, trace, options_);
    if (saved_.only_these_rows.empty()) saved_.only_these_rows = only_these_rows;
    add(calls.call, trace, script, only_these_rows.empty());
  }

  /// Writes the folder. An old step there stays whole until the last file is written, and is then removed.
  SavedStep write() {
    auto manifest = manifest_of(step_);
    manifest.values["settings"] = settings_text();
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
  void add(const StepCall& call, const StepTrace& trace, const std::string& script, bool any_rows) {
    GraphDescription graph{"training"};
    graph.batch = layout_text(call.batch);
    if (any_rows) graph.any_rows = layout_text(call.batch, true);
    graph.items = trace.loss.items;
    if (any_rows && graph.items == static_cast<double>(call.batch.front().size(0)))
      graph.items = GraphDescription::items_are_rows;
    graph.output = trace.loss.output.defined();
    graph.target = index_of_target(trace.loss, call.batch);
    graph.trace = name_of_graph(step_.graphs.size()) + "." + crc_of(script) + ".pt";
    graph.operations = crc_of(trace.operations);
    saved_.batches.push_back(any_rows ? graph.any_rows : graph.batch);
    scripts_.push_back(script);
    step_.graphs.push_back(std::move(graph));
  }

  void check_folder() const {
    const auto names = names_in(folder_);
    if (names.empty()) return;
    if (std::ranges::find(names, manifest_name) == names.end())
      throw std::runtime_error(folder_.string() + ": must be a new folder or a saved step, but contains other files");
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
  TORCH_CHECK(!calls.empty(), "save_steps: at least one batch must be given, got none");
  StepSaver saver(module, folder, options);
  for (auto& of_one : calls) saver.add(of_one);
  return saver.write();
}

/// Finds the graph for a batch, checks it on the first batch of a layout, and runs it.
class LoadedStep final : public RecordedSteps<CompiledStepReport> {
 public:
  LoadedStep(torch::nn::Module& module, const StepSource& source)
      : steps_(std::make_shared<StepGraphs>("CompiledStep", StepModel(module), source)) {
    if (has_graphs(*steps_->model().device()) && !steps_->waits()) captured_ = capture_steps(module, {});
  }

  Loss run(std::vector<at::Tensor> batch, c10::function_ref<Loss()> objective) override {
    if (!at::GradMode::is_enabled()) return objective();  // an evaluation, not a step
    const auto& model = steps_->model();
    if (auto modes = model.modes(); modes != modes_) {
      modes_fit_ = model.text(modes) == steps_->description().modes;
      modes_ = std::move(modes);
    }
    if (!modes_fit_) return eager("other modes: " + model.text(*modes_), objective);
    if (!model.unchanged())
      return eager("the model had " + first_difference(steps_->description().model, model.text()), objective);
    auto& layout = layout_of_batch(batch);
    if (layout.graph && !layout.checked) check(layout, batch, objective);
    if (!layout.graph) return eager(layout.why_eager, objective);
    auto loss = compiled(*layout.graph, batch);
    add_flops(layout.flops);
    ++report.compiled;
    if (captured_) report.replayed = captured_->report.replayed;
    return loss;
  }

 private:
  /// A batch layout seen before.
  struct Layout {
    const StepGraph* graph = nullptr;
    bool checked = false;
    std::string why_eager = {};   // if there is no graph
    FlopsByOperation flops = {};  // of the objective
  };

  /// Runs a graph's code. On a device, captures and replays it, unless it cannot be captured because it copies from the
  /// CPU or synchronizes.
  Loss compiled(const StepGraph& graph, const std::vector<at::Tensor>& batch) {
    const auto run = [&] { return steps_->trained(graph, batch); };
    if (captured_) try {
        return captured_->run(batch, run);
      } catch (const c10::Error& error) {
        TORCH_WARN(steps_->name(), " runs without graphs: ", error.what_without_backtrace());
        captured_ = nullptr;
      }
    return run();
  }

  Layout& layout_of_batch(const std::vector<at::Tensor>& batch) {
    const auto [entry, is_new] = layouts_.try_emplace(layout_key(batch));
    auto& layout = entry->second;
    if (!is_new) return layout;
    layout.graph = steps_->find(batch, [](auto&) { return true; });
    if (!layout.graph) layout.why_eager = "no graph for " + layout_text(batch);
    return layout;
  }

  /// Compares the graph of a layout with the objective. Throws if it is another program; the next batch is then
  /// compared again. In doubt, warns, and runs the layout's batches by the objective.
  void check(Layout& layout, const std::vector<at::Tensor>& batch, c10::function_ref<Loss()> objective) const {
    const UncountedScope hidden_from_others;
    const FlopCounter counter;
    const StepTrial trial(steps_->model());
    const StepComparison comparison(trial, steps_->model(), batch, objective,
                                    [&] { return steps_->tried(trial, *layout.graph, batch); });
    const auto& name = steps_->name();
    TORCH_CHECK(comparison.wrong.empty(), name, ": the compiled step must do what the objective does, but for ",
                layout_text(batch), " ", comparison.wrong, ": the objective or the model has changed ",
                "since the step was saved, or depends on values that are not in tensors; save and compile it again");
    layout.checked = true;
    layout.flops = counter.get_flop_counts();
    const auto doubt = comparison.doubt.empty()
                           ? other_operations(trial, *layout.graph, batch, objective)
                           : comparison.doubt + ", which may be rounding or a different computation";
    if (doubt.empty()) return;
    layout.graph = nullptr;
    layout.why_eager = "a doubt about the step for " + layout_text(batch) + ": " + doubt;
    TORCH_WARN(name, ": the objective runs instead of the compiled step: ", layout.why_eager);
  }

  /// Returns a text if the objective has other operations or constants than the recorded one. Their values may be equal
  /// for a batch, as with another bound that it does not reach.
  std::string other_operations(const StepTrial& trial, const StepGraph& graph, const std::vector<at::Tensor>& batch,
                               c10::function_ref<Loss()> objective) const try {
    for (std::size_t i = 0; i < batch.size(); ++i)
      for (std::size_t k = 0; k < i; ++k)
        if (batch[i].is_same(batch[k])) return "";  // a trace takes both for the first
    if (graph.description.operations.empty()) return "";
    const auto trace = trace_of(trial, steps_->model(), {batch, [&] { return objective(); }}, /*constants=*/true);
    return crc_of(trace.operations) == graph.description.operations
               ? ""
               : "the objective has other operations or numbers than the recorded one; save and compile it again";
  } catch (const std::exception& error) {
    return "the objective cannot be recorded any more: " + first_line(error.what());
  }

  std::shared_ptr<StepGraphs> steps_;
  std::shared_ptr<RecordedSteps<GraphedStepReport>> captured_;  // null: code is not captured
  std::map<std::vector<std::int64_t>, Layout> layouts_;
  std::optional<StepModes> modes_;  // the last ones, and whether they fit the description
  bool modes_fit_ = false;
};

GRADACCUM_INLINE std::shared_ptr<RecordedSteps<CompiledStepReport>> load_step(torch::nn::Module& module,
                                                                              const std::filesystem::path& folder) {
  return std::make_shared<LoadedStep>(module, StepSource(folder));
}

GRADACCUM_INLINE std::shared_ptr<RecordedSteps<CompiledStepReport>> load_step(torch::nn::Module& module,
                                                                              const InProgram& step) {
  return std::make_shared<LoadedStep>(module,
                                      StepSource(step.name, step_in_program(step.name, "CompiledStep"), step_format));
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const CompiledStepReport& report) {
  stream << report.compiled << " of " << report.compiled + report.eager << " steps compiled";
  if (report.replayed > 0) stream << ", " << report.replayed << " of them replayed as graphs";
  stream << '\n';
  for (auto& [why, count] : report.why_eager) stream << count << " not: " << why << '\n';
  return stream;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const SavedStep& step) {
  stream << step.folder.string() << ": recorded a step of";
  for (std::size_t i = 0; i < step.batches.size(); ++i) stream << (i ? "; of " : " ") << step.batches[i];
  if (!step.only_these_rows.empty()) stream << "\nOnly of so many rows: " << step.only_these_rows;
  return stream << "\nCompile it: gradaccum-compile-step " << step.folder.string() << '\n';
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
