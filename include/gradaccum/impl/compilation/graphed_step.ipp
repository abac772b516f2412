// SPDX-License-Identifier: Apache-2.0
// Captures steps on a device as graphs, and replays them.
#pragma once

#include <gradaccum/detail/compilation/device_graph.hpp>
#include <gradaccum/detail/types/uncounted.hpp>
#include <gradaccum/detail/window/backward_seed.hpp>
#include <gradaccum/flop_counter.hpp>
#include <gradaccum/graphed_step.hpp>

#include <gradaccum/impl/compilation/step_graphs.ipp>
#include <gradaccum/memory_meter.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#if defined(GRADACCUM_LINKS_CUDA) && __has_include(<cuda_runtime_api.h>)
#define GRADACCUM_HAS_CUDA_GRAPHS
#include <ATen/cuda/CUDAGraph.h>
#endif

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <ostream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

#ifdef GRADACCUM_HAS_CUDA_GRAPHS
/// LibTorch's wheels up to 2.15 register no graphs for CUDA.
struct CudaGraph final : GraphImplInterface {
  void capture_end() override { graph.capture_end(); }
  void replay() override { graph.replay(); }
  GraphPool pool() const override { return graph.pool(); }
#if __has_include(<ATen/core/GraphImplInterface.h>)
  void capture_begin(GraphPool pool, at::GraphCaptureMode /*mode*/) override {
    graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  }
  void instantiate() override { graph.instantiate(); }
  void reset() override { graph.reset(); }
  void enable_debug_mode() override { graph.enable_debug_mode(); }
  void debug_dump(const std::string& /*path*/) override {}
#else
  void capture_begin(GraphPool pool) override { graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal); }
#endif

  mutable at::cuda::CUDAGraph graph;
};
#endif

using GraphMaker = std::function<std::unique_ptr<GraphImplInterface>()>;

/// Returns the function that constructs graphs of a device; empty if it has none.
#if __has_include(<ATen/core/GraphImplInterface.h>)
GRADACCUM_INLINE GraphMaker graph_maker(c10::DeviceType device) {
  if (at::has_graph_impl(device)) return [device] { return at::create_graph_impl(device); };
#ifdef GRADACCUM_HAS_CUDA_GRAPHS
  if (device == c10::kCUDA) return [] { return std::make_unique<CudaGraph>(); };
#endif
  return nullptr;
}

GRADACCUM_INLINE void begin_capture(GraphImplInterface& graph, GraphPool pool) {
  graph.capture_begin(pool, at::GraphCaptureMode::ThreadLocal);  // a thread that prefetches may allocate
}
#else
GRADACCUM_INLINE GraphMaker& device_graph_maker() {
  static GraphMaker make
#ifdef GRADACCUM_HAS_CUDA_GRAPHS
      = [] { return std::make_unique<CudaGraph>(); }
#endif
  ;
  return make;
}

GRADACCUM_INLINE GraphMaker graph_maker(c10::DeviceType device) {
  return device == c10::kCUDA ? device_graph_maker() : nullptr;
}

GRADACCUM_INLINE void begin_capture(GraphImplInterface& graph, GraphPool pool) { graph.capture_begin(pool); }
#endif

GRADACCUM_INLINE bool has_graphs(c10::Device device) { return graph_maker(device.type()) != nullptr; }

/// Remembers the first operation that failed on this thread or on autograd's threads for it.
class FailedOperation {
 public:
  FailedOperation()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback([](auto&) { return std::unique_ptr<at::ObserverContext>(); }, &end)
                .scopes({at::RecordScope::FUNCTION}))) {
    set("");
  }
  FailedOperation& operator=(FailedOperation&&) = delete;
  ~FailedOperation() { at::removeCallback(handle_); }

  std::string name() const { return set(std::nullopt); }

 private:
  static void end(const at::RecordFunction& function, at::ObserverContext* /*none*/) {
    if (std::uncaught_exceptions() > 0 && set(std::nullopt).empty()) set(function.name());
  }
  static std::string set(std::optional<std::string> name) {
    static std::mutex mutex;
    static std::string failed;
    const std::lock_guard lock(mutex);
    if (name) failed = std::move(*name);
    return failed;
  }

  at::CallbackHandle handle_;
};

GRADACCUM_INLINE DeviceGraph::DeviceGraph(c10::Stream stream, GraphPool pool, c10::function_ref<void()> work)
    : impl_(graph_maker(stream.device_type())()) {
  const c10::StreamGuard guard(stream);
  const FailedOperation failed;
  begin_capture(*impl_, pool);
  try {
    work();
  } catch (...) {
    try {
      impl_->capture_end();
    } catch (const std::exception&) {  // the pending error caused this one
    }
    try {
      throw;
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "GraphedStep: ", failed.name().empty() ? "the objective" : failed.name(),
                  " cannot be captured: ", first_line(error.what_without_backtrace()),
                  " (a captured step must not synchronize, nor copy from the CPU: move tensors to the device ",
                  "before it)");
    }
  }
  impl_->capture_end();
}

/// Gives leaves new gradient accumulators without hooks for a scope. They belong to the stream of the pass that creates
/// them; an old one would make its stream wait for the captured stream.
class FreshAccumulators {
 public:
  explicit FreshAccumulators(const std::vector<at::Tensor>& leaves) {
    leaves_.reserve(leaves.size());
    for (auto& leaf : leaves) {
      if (!leaf.requires_grad()) continue;
      leaves_.push_back({leaf, torch::autograd::impl::try_get_grad_accumulator(leaf), {}});
      exchange(leaves_.back(), NodePointer());
    }
  }
  FreshAccumulators& operator=(FreshAccumulators&&) = delete;
  ~FreshAccumulators() {
    for (auto& leaf : leaves_) exchange(leaf, leaf.accumulator);
  }

 private:
  struct Leaf {
    at::Tensor tensor;
    NodePointer accumulator;
    std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks;
  };

  static void exchange(Leaf& leaf, const NodePointer& accumulator) {
    torch::autograd::impl::set_grad_accumulator(
        leaf.tensor, decltype(torch::autograd::AutogradMeta::grad_accumulator_)(accumulator));
    std::swap(torch::autograd::impl::hooks(leaf.tensor), leaf.hooks);
  }

  std::vector<Leaf> leaves_;
};

/// Captured step of one layout. Each replay overwrites its tensors.
struct CapturedStep {
  std::vector<at::Tensor> batch;
  Loss loss = at::Tensor();
  std::int64_t target = -1;  ///< the index of the target among the batch's tensors; < 0: not one of them
  at::Tensor seed = {};
  std::vector<at::Tensor> parameters, gradients;  ///< parameters with a gradient, and their gradients
  std::vector<at::Tensor> moved;                  ///< buffers
  std::optional<DeviceGraph> forward = {}, backward = {};
};

/// Returns a tensor that does not keep its memory in the graph's pool alive.
GRADACCUM_INLINE at::Tensor without_owner(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cpu()) return tensor.detach();
  return at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, tensor.options().requires_grad(false),
      tensor.device());
}

/// Forward pass that was replayed on a stream, and whose backward is pending.
struct PendingBackward {
  std::shared_ptr<const CapturedStep> step;
  c10::Stream stream;
};

GRADACCUM_INLINE c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// The only operation of a graphed step that autograd sees.
class GraphedBackward final : public torch::autograd::Node {
 public:
  explicit GraphedBackward(std::shared_ptr<const PendingBackward> pending) : pending_(std::move(pending)) {}

  std::string name() const override { return "GraphedBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& seeds) override {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "GraphedStep: create_graph must be false: a graphed step has no double backward");
    TORCH_CHECK(!torch::autograd::get_current_graph_task_keep_graph(),
                "GraphedStep: retain_graph must be false: backward overwrites the tensors that forward saved for it");
    const auto step = replayed([&](const at::Tensor& seed) { seed.copy_(seeds[0].reshape(seed.sizes())); });
    return at::_foreach_mul(step->gradients, 1);  // copies, as the next replay overwrites them
  }

  /// Returns the graph's own gradients, which the next replay overwrites, if forward ran on this thread's current
  /// stream. The caller keeps the captured step until it has added them, since they do not own their memory.
  std::vector<at::Tensor> own_gradients(const at::Tensor& seed) {
    if (!pending_ || pending_->stream != current_stream(pending_->stream.device())) return {};
    const auto set = [&](auto& start) { seed.is_cpu() ? start.fill_(seed.item<double>()) : start.copy_(seed); };
    return replayed(set)->gradients;
  }

  void release_variables() override { pending_ = nullptr; }

 private:
  /// Replays backward from a seed that `set` writes.
  std::shared_ptr<const CapturedStep> replayed(c10::function_ref<void(const at::Tensor& seed)> set) {
    TORCH_CHECK(pending_, "GraphedStep: backward must run only once for each step(batch)");
    const auto step = pending_->step;
    set(step->seed);
    pending_ = nullptr;
    step->backward->replay();
    return step;
  }

  std::shared_ptr<const PendingBackward> pending_;
};

/// Captures the step of each layout, checks it against the objective, and replays it.
class CapturedSteps final : public RecordedSteps<GraphedStepReport> {
 public:
  CapturedSteps(torch::nn::Module& module, const GraphedStepOptions& options) : model_(module), options_(options) {
    TORCH_CHECK(options.graphs >= 1, "GraphedStep: graphs must be >= 1, got ", options.graphs);
    TORCH_CHECK(!model_.parameters.empty(), "GraphedStep: the model must have parameters");
  }

  Loss run(std::vector<at::Tensor> batch, c10::function_ref<Loss()> objective) override {
    if (!at::GradMode::is_enabled()) return objective();  // an evaluation, not a step
    capture_moved_anew();
    auto& layout = layouts_[key_of(batch)];
    ++layout.uses;
    std::erase_if(batch, [](const at::Tensor& tensor) { return !tensor.defined(); });
    if (const auto why = why_eager(batch); !why.empty()) return eager(why, objective);
    if (!layout.step) {
      const auto place = place_for(layout);
      if (!place) return eager(c10::str("more layouts than .graphs = ", options_.graphs), objective);
      auto made = captured(batch, objective);
      if (*place) **place = {.uses = (*place)->uses};
      made.uses = layout.uses;
      layout = std::move(made);
      ++report.captured;
      report.bytes = bytes();
    } else if (has_new_values(layout, batch)) {
      return eager("values on the CPU that are not those captured", objective);
    } else if (layout.checks < checks) {
      check(layout, batch, objective);
    }
    ++report.replayed;
    add_flops(layout.flops);
    return replayed(layout.step, batch);
  }

 private:
  /// Steps of one layout.
  struct Layout {
    std::shared_ptr<const CapturedStep> step = {};
    std::int64_t uses = 0, checks = 0;
    bool reads_values = true;  ///< false if it does not read the tensors that are on the CPU
    FlopsByOperation flops = {};
  };
  /// Number of batches of a layout that also run by the objective. The second reveals numbers that C++ computes for
  /// each step.
  static constexpr std::int64_t checks = 2;

  std::string why_eager(const std::vector<at::Tensor>& batch) const {
    const auto device = model_.parameters.front().device();
    if (!has_graphs(device)) return c10::str("no graphs on ", device);
    if (!pending_.expired()) return "the loss before has not been backward yet";
    if (std::ranges::all_of(batch, [](const at::Tensor& tensor) { return tensor.is_cpu(); })) return "the batch on cpu";
    for (auto& tensor : batch) {
      if (tensor.device() != device && !tensor.is_cpu()) return c10::str("a tensor of the batch on ", tensor.device());
      if (tensor.requires_grad()) return "a tensor of the batch that requires a gradient";
      if (tensor.layout() != at::kStrided) return c10::str("a tensor of the batch of layout ", tensor.layout());
    }
    for (auto& parameter : model_.parameters)
      if (parameter.device() != device) return c10::str("parameters on ", device, " and ", parameter.device());
    return "";
  }

  /// True if the step reads values on the CPU and they differ from the captured ones.
  static bool has_new_values(const Layout& layout, const std::vector<at::Tensor>& batch) {
    for (std::size_t i = 0; layout.reads_values && i < batch.size(); ++i)
      if (batch[i].is_cpu() && !at::equal(batch[i], layout.step->batch[i])) return true;
    return false;
  }

  std::int64_t bytes() const {
    auto bytes = pool_bytes_;
    for (auto& [key, layout] : layouts_)
      if (layout.step)
        for (auto& tensor : layout.step->batch)
          bytes += tensor.is_cpu() ? 0 : static_cast<std::int64_t>(tensor.nbytes());
    return bytes;
  }

  /// Drops all graphs if a parameter or buffer has other memory than they were captured with.
  void capture_moved_anew() {
    std::vector<std::pair<const void*, bool>> places;
    for (const auto* const tensors : {&model_.parameters, &model_.buffers})
      for (auto& tensor : *tensors)
        places.emplace_back(tensor.has_storage() ? tensor.const_data_ptr() : nullptr, tensor.requires_grad());
    if (places == places_) return;
    places_ = std::move(places);
    layouts_.clear();
    stream_.reset();
    report.bytes = pool_bytes_ = 0;
  }

  std::vector<std::int64_t> key_of(const std::vector<at::Tensor>& batch) const {
    auto key = layout_key(batch);
    const auto modes = model_.modes();
    key.insert(key.end(), modes.training.begin(), modes.training.end());
    key.push_back(modes.autocast ? static_cast<std::int64_t>(*modes.autocast) : -1);
    return key;
  }

  /// Returns the layout to drop for another one, which must be used much more often. Null if there are fewer than
  /// `.graphs`, so that none has to be dropped; nullopt if none may be dropped.
  std::optional<Layout*> place_for(const Layout& layout) {
    std::int64_t graphs = 0;
    Layout* least = nullptr;
    for (auto& [key, other] : layouts_) {
      if (!other.step) continue;
      ++graphs;
      if (!least || other.uses < least->uses) least = &other;
    }
    if (graphs < options_.graphs) return nullptr;
    return layout.uses > 2 * least->uses ? std::optional(least) : std::nullopt;
  }

  /// Captures the step of a batch, and compares it with the objective. Leaves buffers, random state and gradients
  /// unchanged.
  Layout captured(const std::vector<at::Tensor>& batch, c10::function_ref<Loss()> objective) {
    const UncountedScope hidden_from_others;
    const FlopCounter counter;
    const StepTrial trial(model_);
    auto step = std::make_shared<CapturedStep>();
    Layout layout;
    const ExchangedTensors own(
        batch, [&](const at::Tensor& tensor) { return step->batch.emplace_back(tensor.detach().clone()); });
    const FreshAccumulators accumulators(model_.parameters);
    const auto device = model_.parameters.front().device();
    const c10::impl::VirtualGuardImpl devices(device.type());
    if (!stream_) stream_ = devices.getStreamFromGlobalPool(device);
    devices.synchronizeDevice(device.index());
    const auto wanted = [&] {
      const c10::StreamGuard guard(*stream_);  // the first pass loads kernels, and chooses among them
      layout.reads_values = reads_values(trial, batch, objective);
      return trial.result(objective);
    }();
    devices.synchronizeDevice(device.index());
    const auto memory = [&] { return device_memory(device).value_or(DeviceMemory()); };
    if (const auto now = memory(); now.free < now.reserved) empty_device_cache(device);  // a capture cannot use it
    const auto reserved_before = memory().reserved;
    const auto casts_of_the_graph_end = c10::make_scope_exit([] { at::autocast::clear_cache(); });
    at::autocast::clear_cache();
    std::vector<std::int64_t> before;
    for (auto& buffer : model_.buffers) before.push_back(buffer._version());
    Loss loss = at::Tensor();
    step->forward.emplace(*stream_, pool(), [&] { loss = objective(); });
    check_captured(loss);
    for (std::size_t i = 0; i < before.size(); ++i)
      if (model_.buffers[i]._version() != before[i]) step->moved.push_back(model_.buffers[i]);
    step->seed = at::ones_like(loss.mean.detach());
    std::vector<at::Tensor> gradients;
    step->backward.emplace(*stream_, step->forward->pool(), [&] { gradients = capture_backward(*step, loss); });
    const auto bytes_of_graphs = memory().reserved - reserved_before;
    for (auto& gradient : gradients) step->gradients.push_back(without_owner(gradient));
    step->target = index_of_target(loss, batch);
    step->loss = Loss(without_owner(loss.mean), loss.items);
    step->loss.output = without_owner(loss.output);
    if (step->target < 0) step->loss.target = without_owner(loss.target);
    layout.step = step;
    layout.flops = counter.get_flop_counts();
    compare(layout, batch, wanted, trial);
    pool_bytes_ += bytes_of_graphs;
    return layout;
  }

  /// Runs the objective, with tensors on the CPU whose values cannot be read. Returns whether it reads them.
  static bool reads_values(const StepTrial& trial, const std::vector<at::Tensor>& batch,
                           c10::function_ref<Loss()> objective) {
    const ExchangedTensors unreadable(batch, [](const at::Tensor& tensor) {
      if (!tensor.is_cpu()) return at::Tensor();
      auto copy = tensor.clone();
      copy.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
          "GraphedStep: a value on the CPU is read");
      return copy;
    });
    try {
      trial.result(objective);
      return false;
    } catch (const std::exception&) {
      return true;  // an error with another cause recurs
    }
  }

  /// Returns the pool of the existing graphs. A pool must not be reused after its last graph is destroyed.
  GraphPool pool() const {
    for (auto& [key, layout] : layouts_)
      if (layout.step) return layout.step->forward->pool();
    return {0, 0};
  }

  /// Throws if a loss has parts that a replay would omit.
  void check_captured(const Loss& loss) const {
    loss.check();
    const auto seed = product_of(loss.seed);
    TORCH_CHECK(seed.is_one(), "GraphedStep: a loss scale or weight must be applied to what step(batch) ",
                "returns, not to the objective's loss");
    for_each_node(loss.mean, [&](torch::autograd::Node& node) {
      const auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node);
      TORCH_CHECK(
          !leaf || std::ranges::any_of(model_.parameters, [&](auto& own) { return own.is_same(leaf->variable); }),
          "GraphedStep: every tensor that requires grad must be a parameter of the model, got another one of shape ",
          leaf->variable.sizes(), ": register it, or wrap both in one module");
    });
  }

  /// Computes the gradients, each in separate memory with the layout of its parameter.
  std::vector<at::Tensor> capture_backward(CapturedStep& step, const Loss& loss) const {
    const auto trained = model_.trained();
    std::vector<at::Tensor> gradients;
    const BackwardSeedScope seed({.device_numerator = step.seed.reshape({}).to(at::kDouble)}, step.seed.device());
    auto computed = torch::autograd::grad({loss.mean}, trained, {step.seed}, /*retain_graph=*/false,
                                          /*create_graph=*/false, /*allow_unused=*/true);
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < trained.size(); ++i) {
      auto& gradient = computed[i];
      if (!gradient.defined()) continue;
      TORCH_CHECK(gradient.layout() == at::kStrided, "GraphedStep: gradients must be dense, got one of layout ",
                  gradient.layout(), " for a parameter of shape ", trained[i].sizes());
      const bool alone = gradient.storage().use_count() == 1 && gradient.use_count() == 1;
      if (!alone || !torch::autograd::utils::obeys_layout_contract(gradient, trained[i]))
        gradient = torch::autograd::utils::clone_obey_contract(gradient, trained[i]);
      step.parameters.push_back(trained[i]);
      gradients.push_back(gradient);
    }
    return gradients;
  }

  Loss replayed(const std::shared_ptr<const CapturedStep>& step, const std::vector<at::Tensor>& batch) {
    const auto copy = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.clone() : tensor; };
    Loss loss = at::Tensor();
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < batch.size(); ++i)
        if (!batch[i].is_cpu()) step->batch[i].copy_(batch[i], /*non_blocking=*/true);
      step->forward->replay();
      loss = Loss(step->loss.mean.clone(), step->loss.items);  // copies, as the next replay overwrites them
      loss.output = copy(step->loss.output);
      loss.target = step->target < 0 ? copy(step->loss.target) : batch[static_cast<std::size_t>(step->target)];
    }
    for (auto& buffer : step->moved) buffer.unsafeGetTensorImpl()->bump_version();
    auto pending = std::make_shared<const PendingBackward>(PendingBackward{step, current_stream(step->seed.device())});
    pending_ = pending;
    const auto node = new_node<GraphedBackward>(std::move(pending));
    node->set_next_edges(torch::autograd::collect_next_edges(step->parameters));
    torch::autograd::set_history(loss.mean, node);
    return loss.with_gradients(step->parameters, [node, step](const at::Tensor& seed) {
      return static_cast<GraphedBackward&>(*node).own_gradients(seed);
    });
  }

  /// Compares a step with the objective. Throws if it is another program; the next batch is then compared again.
  void check(Layout& layout, const std::vector<at::Tensor>& batch, c10::function_ref<Loss()> objective) {
    const StepTrial trial(model_);
    const FreshAccumulators accumulators(model_.parameters);
    compare(layout, batch, trial.result(objective), trial);
  }

  void compare(Layout& layout, const std::vector<at::Tensor>& batch, const TrialResult& wanted,
               const StepTrial& trial) {
    const FreshAccumulators accumulators(model_.parameters);  // the captured pass's belong to its stream
    const auto got = trial.result([&] { return replayed(layout.step, batch); });
    const auto found = differences_of_steps(model_, wanted, got);
    TORCH_CHECK(found.empty(), "GraphedStep: the captured step must do what the objective does, but for ",
                layout_text(batch), " ", found.front().text(),
                ": the objective uses C++ numbers or CPU values that differ for this batch, or tensors that belong "
                "neither to the model nor to the batch");
    ++layout.checks;
  }

  StepModel model_;
  GraphedStepOptions options_;
  std::map<std::vector<std::int64_t>, Layout> layouts_;
  std::vector<std::pair<const void*, bool>> places_;
  std::weak_ptr<const PendingBackward> pending_;
  std::optional<c10::Stream> stream_ = {};  // shared: streams do not share cached memory
  std::int64_t pool_bytes_ = 0;
};

GRADACCUM_INLINE std::shared_ptr<RecordedSteps<GraphedStepReport>> capture_steps(torch::nn::Module& module,
                                                                                 const GraphedStepOptions& options) {
  return std::make_shared<CapturedSteps>(module, options);
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const GraphedStepReport& report) {
  stream << report.replayed << " steps replayed, " << report.eager << " eager; captured " << report.captured
         << fmt::format(" times, in {:.1f} MiB", static_cast<double>(report.bytes) / MiB);
  for (auto& [why, count] : report.why_eager) stream << "\n  " << count << ": " << why;
  return stream << '\n';
}

}  // namespace gradaccum

#undef GRADACCUM_HAS_CUDA_GRAPHS
#undef GRADACCUM_INLINE
