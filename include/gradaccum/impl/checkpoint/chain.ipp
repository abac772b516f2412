// SPDX-License-Identifier: Apache-2.0
// Implements CheckpointedSequential: measures stages, plans within a memory budget, and runs by the plan.
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <ostream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE at::Tensor Stage::forward(std::size_t way, at::Tensor activations, const at::Tensor& context) {
  std::optional<RebuildingScope> rebuilding;
  if (way > 0) rebuilding.emplace();
  run_watched(modules(), /*calls_others=*/false, [&] {
    for (auto& module : parts)
      activations = context.defined() ? module.forward(std::move(activations), at::Tensor(context))
                                      : module.forward(std::move(activations));
  });
  return activations;
}

GRADACCUM_INLINE at::Tensor Segment::operator()(at::Tensor activations) const {
  for (auto& item : *schedule) {
    if (item.segment.empty()) {
      activations = (*stages)[item.stage].forward(item.way, std::move(activations), context);
    } else {
      const Segment inside{stages, {schedule, &item.segment}, options, context};
      activations = run_checkpointed(options, inside, std::exchange(activations, {}));
    }
  }
  return activations;
}

GRADACCUM_INLINE std::int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.storage().nbytes());
}

/// Zeros on a device, with the layout and storage size of another tensor. On the meta device they are only a layout.
GRADACCUM_INLINE at::Tensor zeros_laid_out_as(const at::Tensor& tensor, at::Device device) {
  const auto elements = storage_bytes(tensor) / static_cast<std::int64_t>(tensor.element_size());
  return at::zeros({elements}, tensor.options().device(device).requires_grad(false))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

/// Stands in for the part before a stage, so that the stage's input is not a leaf, as between stages.
struct GradientSink : torch::autograd::Function<GradientSink> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) { return input.detach(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Stands in for the part after a stage. Its backward makes a gradient of a given layout that only the backward pass
/// owns, like the gradients between stages. `*memory` becomes a weak reference to the gradient's storage.
struct GradientSource : torch::autograd::Function<GradientSource> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                            const at::Tensor& layout, WeakStorage* memory) {
    context->saved_data["layout"] = layout;
    context->saved_data["device"] = output.device();
    context->saved_data["memory"] = reinterpret_cast<std::int64_t>(memory);
    return at::zeros({}, output.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    auto& saved = context->saved_data;
    const auto gradient = zeros_laid_out_as(saved["layout"].toTensor(), saved["device"].toDevice());
    *reinterpret_cast<WeakStorage*>(saved["memory"].toInt()) = gradient.storage().getWeakStorageImpl();
    return {gradient, {}, {}};
  }
};

/// Measures the seconds since its construction. Waits for the device.
class StopWatch {
 public:
  explicit StopWatch(c10::Device device) : device_(device) { wait(); }
  double seconds() const {
    wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  void wait() const {
    if (!device_.is_cpu()) c10::impl::getDeviceGuardImpl(device_.type())->synchronizeDevice(device_.index());
  }

  c10::Device device_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Measures the cost of a stage by running it alone, forward and backward. Excludes its input, gradients of parameters,
/// and the output of a chain's last stage.
class StageMeasurement {
 public:
  /// `layout`: the layout of the output's gradient; if undefined, the output's layout.
  StageMeasurement(Stage& stage, const at::Tensor& input, const at::Tensor& context, const at::Tensor& layout,
                   bool last, const CheckpointOptions& options)
      : gradient_layout(layout), stage_(stage), input_(input), context_(context), last_(last), options_(options) {
    options_.check_content = false;  // each run changes statistics that operations save
    if (input.requires_grad()) sources_.push_back(input.detach().requires_grad_());
    for (auto* module : stage.modules())
      for (auto& parameter : module->parameters())
        if (parameter.requires_grad()) sources_.push_back(parameter);
  }

  StageCost measure() {
    constexpr int fewest_runs = 3, most_runs = 10;  // the first warms up; runs of small stages are short and noisy
    constexpr double enough_seconds = 0.05;
    {
      const at::NoGradGuard keep_nothing;
      const RecordingScope recording(&buffers_);
      stage_.forward(0, input_, context_);
    }
    StageCost cost;
    const StopWatch watch(input_.device());
    for (int run = 0; run < fewest_runs || (run < most_runs && watch.seconds() < enough_seconds); ++run) {
      if (run < 2) cost = {.ways = std::vector<StageCost::Way>(2)};  // drops the warm-up, whose allocations may stay
      for (std::size_t way = 0; way < cost.ways.size(); ++way) {
        measure_dropped(cost, way);
        measure_kept(cost.ways[way], way);
      }
    }
    for (auto& state : buffers_.changed) {
      const auto bytes = static_cast<std::int64_t>(state->buffer.nbytes());
      cost.copies += bytes;
      if (state->before.defined()) cost.buffers += bytes;
    }
    if (cost.ways[1].held >= cost.ways[0].held) cost.ways.pop_back();
    for (auto& way : cost.ways)  // at most all of forward, apart from noise
      way.again_seconds = std::min(way.again_seconds, cost.forward_seconds);
    return cost;
  }

  /// Returns the input of the next stage.
  at::Tensor output() {
    const at::NoGradGuard keep_nothing;
    return stage_.forward(0, input_, context_).requires_grad_(output_requires_grad_);
  }

  at::Tensor gradient_layout;        // of the output's gradient
  at::Tensor input_gradient_layout;  // undefined if it has none

 private:
  static constexpr auto in_profiler =
      "CheckpointedSequential: must not plan inside LibTorch's profiler, which uses the same hook; run one forward "
      "pass before it starts";

  at::Tensor input() const { return input_.requires_grad() ? GradientSink::apply(sources_.front()) : input_; }

  void measure_kept(StageCost::Way& way, std::size_t number) {
    const FrozenBuffers frozen(buffers_.changed);  // not in the log: where a segment makes copies, `copies` counts them
    AllocationScope log(in_profiler);
    at::Tensor output = stage_.forward(number, input(), context_);
    if (last_) log->exclude(output);
    const auto forward = log->between(0, log->now());
    const auto [backward, seconds] = run_backward(*log, std::move(output));
    more(way.held, forward.live);
    more(way.forward_peak, forward.peak);
    more(way.backward_peak, backward.peak);
    less(way.backward_seconds, seconds);
  }

  void measure_dropped(StageCost& cost, std::size_t number) {
    AllocationScope log(in_profiler);
    const StopWatch watch(input_.device());
    int runs = 0;
    std::size_t again_begin = 0;  // of the function's second run
    double again_seconds = 0;
    at::Tensor output = run_checkpointed(
        options_,
        [&](const at::Tensor& input) {
          const double begun = watch.seconds();
          if (++runs == 2) again_begin = log->now();
          const auto ended = c10::make_scope_exit([&]() noexcept {  // a recomputation ends by an exception
            if (runs == 2) again_seconds = watch.seconds() - begun;
          });
          return stage_.forward(number, input, context_);
        },
        input());
    less(cost.forward_seconds, watch.seconds());
    if (last_) log->exclude(output);
    more(cost.forward_peak, log->between(0, log->now()).peak);
    more(cost.output, storage_bytes(output));
    auto& way = cost.ways[number];
    more(way.again_peak, run_backward(*log, std::move(output)).first.peak);
    less(way.again_seconds, again_seconds);
    more(cost.output_gradient, std::max(storage_bytes(gradient_layout), log->between(0, again_begin).live));
  }

  std::pair<AllocationLog::Bytes, double> run_backward(AllocationLog& log, at::Tensor output) {
    if (!gradient_layout.defined()) gradient_layout = zeros_laid_out_as(at::empty_like(output, at::kMeta), at::kMeta);
    output_requires_grad_ = output.requires_grad();
    if (!output_requires_grad_) return {};
    WeakStorage output_gradient = output.storage().getWeakStorageImpl();  // a stand-in until backward makes it
    const auto source = GradientSource::apply(output, gradient_layout, &output_gradient);
    log.exclude(source);
    output.reset();  // from now on only operations that need it own it
    const auto begin = log.now();
    const StopWatch watch(input_.device());
    const auto gradients = gradients_without_hooks(source);
    const double seconds = watch.seconds();
    exclude_parameters(log, gradients, output_gradient);
    return {log.between(begin, log.now()), seconds};
  }

  /// Computes gradients with the hooks of leaves removed, so that they do not see gradients that are only measured.
  std::vector<at::Tensor> gradients_without_hooks(const at::Tensor& root) {
    std::vector<std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>> hooks(sources_.size());
    const auto exchange = [&](std::size_t i) { std::swap(torch::autograd::impl::hooks(sources_[i]), hooks[i]); };
    for (std::size_t i = 0; i < sources_.size(); ++i) exchange(i);
    const auto restore = c10::make_scope_exit([&]() noexcept {
      for (auto i = sources_.size(); i-- > 0;) exchange(i);  // in reverse: a leaf may be listed twice
    });
    return torch::autograd::grad({root}, sources_, {}, /*retain_graph=*/false, /*create_graph=*/false,
                                 /*allow_unused=*/true);
  }

  /// Excludes gradients of parameters, except if they share the memory of a gradient passed through the stage.
  void exclude_parameters(AllocationLog& log, const std::vector<at::Tensor>& gradients,
                          const WeakStorage& output_gradient) {
    const c10::StorageImpl* input_gradient = nullptr;
    if (input_.requires_grad() && gradients.front().defined()) {
      input_gradient_layout = zeros_laid_out_as(gradients.front(), at::kMeta);
      input_gradient = memory_of(gradients.front());
    }
    for (std::size_t i = input_.requires_grad(); i < gradients.size(); ++i) {
      const auto* const memory = memory_of(gradients[i]);
      const bool is_passed_on = memory == input_gradient || memory == output_gradient._unsafe_get_target();
      if (memory && !is_passed_on) log.exclude(gradients[i]);
    }
  }
  static const c10::StorageImpl* memory_of(const at::Tensor& gradient) {
    if (!gradient.defined()) return nullptr;
    const auto numbers = gradient.is_sparse() ? gradient._values() : gradient;
    return numbers.has_storage() ? numbers.storage().unsafeGetStorageImpl() : nullptr;
  }

  static void more(std::int64_t& most, std::int64_t bytes) { most = std::max(most, bytes); }
  static void less(double& least, double seconds) { least = least == 0 ? seconds : std::min(least, seconds); }

  Stage& stage_;
  at::Tensor input_, context_;
  bool last_;
  CheckpointOptions options_;
  BufferRecord buffers_;
  bool output_requires_grad_ = false;
  std::vector<at::Tensor> sources_;
};

/// Returns the number of owners of a tensor plus the number of owners of its memory.
GRADACCUM_INLINE std::size_t owners(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.defined() && tensor.has_storage(),
      "CheckpointedSequential: with memory_budget, the input and the outputs of modules must be dense tensors, got ",
      tensor.defined() ? c10::str("layout ", tensor.layout()) : "an undefined tensor");
  return tensor.use_count() + tensor.storage().use_count();
}

GRADACCUM_INLINE Stages merged(const Stages& stages, const at::Tensor& input, const at::Tensor& context) {
  Stages merged;
  auto activations = input.detach().requires_grad_(input.requires_grad());
  const TensorVersion input_version(activations);
  bool output_is_kept = true, has_gradients = false;
  for (auto stage : stages) {
    if (activations.requires_grad()) activations = GradientSink::apply(activations);  // a leaf has one more owner
    const auto before = owners(activations);
    const TensorVersion version(activations);
    auto output = stage.forward(0, activations, context);
    has_gradients |= output.requires_grad();
    const bool is_apart = output_is_kept || owners(activations) > before;
    if (merged.empty() || (is_apart && has_gradients && !version.changed()))
      merged.push_back(stage);
    else
      merged.back().parts.insert(merged.back().parts.end(), stage.parts.begin(), stage.parts.end());
    output_is_kept = owners(output) > 2;  // this handle and its reference to the storage
    activations = output.detach().requires_grad_(output.requires_grad());
  }
  TORCH_CHECK(!input_version.changed(),
              "CheckpointedSequential: the first module must not change its input in place, but does; construct it "
              "without inplace");
  return merged;
}

GRADACCUM_INLINE StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options,
                                     const at::Tensor& context) {
  const auto same_layout = [](const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && a.strides() == b.strides() && storage_bytes(a) == storage_bytes(b);
  };
  StageCosts costs(stages.size());
  std::vector<at::Tensor> gradient_layouts(stages.size());
  bool first_has_gradients = true, surprised = true;
  // Repeats with the layouts of gradients that the following stages were found to produce.
  for (int pass = 0; pass < 3 && surprised; ++pass) {
    surprised = false;
    auto activations = input;
    for (std::size_t i = 0; i < stages.size(); ++i) {
      const bool last = i + 1 == stages.size();
      StageMeasurement stage(stages[i], activations, context, gradient_layouts[i], last, options);
      costs[i] = stage.measure();
      activations = stage.output();
      gradient_layouts[i] = stage.gradient_layout;
      if (i == 0) first_has_gradients = activations.requires_grad();
      const auto& layout = stage.input_gradient_layout;
      if (i == 0 || !layout.defined()) continue;
      surprised |= !same_layout(layout, gradient_layouts[i - 1]);
      gradient_layouts[i - 1] = layout;
    }
  }
  if (!first_has_gradients) {  // neither its input nor its parameters require any, so it saves nothing itself
    auto& first = costs.front();
    const bool is_last = costs.size() == 1;  // else the next stage may save the output, which counts
    first.ways = {{.held = is_last ? 0 : first.output, .forward_peak = first.forward_peak}};
    first.output_gradient = 0;
  }
  return costs;
}

/// Translates a schedule of merged stages to modules of the chain, for display.
GRADACCUM_INLINE Schedule by_module(const Schedule& schedule, const Stages& stages) {
  std::vector<std::size_t> first{0};
  for (auto& stage : stages) first.push_back(first.back() + stage.parts.size());
  Schedule modules;
  for (auto& item : schedule) {
    if (!item.segment.empty())
      modules.push_back({0, 0, by_module(item.segment, stages)});
    else
      for (auto module = first[item.stage]; module < first[item.stage + 1]; ++module)
        modules.push_back({module, item.way, {}});
  }
  return modules;
}

/// Properties that determine the memory of a forward and backward pass.
struct PlanScope {
  std::vector<std::int64_t> sizes, properties;
  std::size_t dimensions;  // of the input; the context's follow

  /// Returns an upper bound for the bytes of `other` relative to this: 1 if no dimension is larger, infinity if not
  /// only sizes differ. Assumes at most quadratic growth with a dimension, as of attention with the length. A dimension
  /// of the context that changes like one of the input is taken for the same.
  double growth(const PlanScope& other) const {
    if (properties != other.properties) return std::numeric_limits<double>::infinity();
    double factor = 1;
    std::vector<std::pair<std::int64_t, std::int64_t>> grown;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const std::pair change(sizes[i], other.sizes[i]);
      const bool is_known = i >= dimensions && std::ranges::find(grown, change) != grown.end();
      if (change.second <= change.first || is_known) continue;
      grown.push_back(change);
      const double ratio = static_cast<double>(change.second) / static_cast<double>(change.first);  // of 0: infinity
      factor *= ratio * ratio;
    }
    return factor;
  }
};

/// Returns the dimensions from the outermost in memory to the innermost. Operations copy inputs that they need in
/// another order.
GRADACCUM_INLINE std::vector<std::int64_t> order_in_memory(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_contiguous()) return {};
  std::vector<std::int64_t> order(static_cast<std::size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](auto dimension) { return tensor.stride(dimension); });
  order.push_back(tensor.is_non_overlapping_and_dense());
  return order;
}

GRADACCUM_INLINE PlanScope scope_of(const Stages& stages, const at::Tensor& input, const at::Tensor& context) {
  PlanScope scope{input.sizes().vec(), order_in_memory(input), static_cast<std::size_t>(input.dim())};
  const auto add = [&](auto... values) { (scope.properties.push_back(static_cast<std::int64_t>(values)), ...); };
  const auto device = input.device();
  add(input.dim(), device.type(), device.index(), input.scalar_type(), input.requires_grad(), context.defined(),
      at::autocast::get_autocast_dtype(device.type()), at::autocast::is_autocast_enabled(device.type()));
  if (context.defined()) {
    scope.sizes.insert(scope.sizes.end(), context.sizes().begin(), context.sizes().end());
    add(context.dim(), context.scalar_type());
  }
  for (auto* module : modules_of(stages)) {
    for (auto& part : module->modules()) add(part->is_training());
    for (auto& parameter : module->parameters()) add(parameter.requires_grad(), parameter.scalar_type());
  }
  return scope;
}

/// Plan of a chain for one kind of input, and for larger inputs that need at most `growth` times the bytes.
struct ChainPlan {
  PlanScope scope;
  std::shared_ptr<Stages> stages;
  StageCosts costs;
  std::int64_t least;
  double growth = 1;
  std::shared_ptr<const Schedule> schedule = {};
  CheckpointPlan description = {};
};

/// Finds tensors that lambdas of Functionals write to and that are not registered buffers, such as statistics of a
/// captured BatchNorm. Runs a pass without gradients, and undoes its writes.
GRADACCUM_INLINE std::vector<std::shared_ptr<BufferState>> captured_buffers(
    const Stages& modules, const std::vector<std::shared_ptr<BufferState>>& registered, const at::Tensor& input,
    const at::Tensor& context) {
  BufferRecord record;
  if (!calls_functions(modules_of(modules))) return {};
  {
    const at::NoGradGuard keep_nothing;
    const auto undo = c10::make_scope_exit([&]() noexcept {
      for (auto& state : record.changed)
        if (state->before.defined()) state->buffer.copy_(state->before);
    });
    const RecordingScope recording(&record);
    auto activations = input.clone();  // the first module may write to it; merged() then throws
    for (auto stage : modules) activations = stage.forward(0, std::move(activations), context);
  }
  std::erase_if(record.changed, [&](auto& state) {
    const auto is_same = [&](auto& other) { return other->buffer.is_same(state->buffer); };
    return state->buffer.use_count() <= 1 || std::ranges::any_of(registered, is_same);
  });
  return record.changed;
}

/// Leaves random generators, buffers and gradients unchanged, and is invisible to outer hooks: an outer checkpoint must
/// not see tensors of a measurement, since its recomputation does not repeat the measurement. Throws if a module
/// replaces a buffer, which a later pass could no longer detect.
GRADACCUM_INLINE ChainPlan measured(const Stages& modules, const CheckpointOptions& options, PlanScope scope,
                                    const at::Tensor& input, const at::Tensor& context) {
  const auto buffers = buffers_of(modules_of(modules));
  auto plan = [&]() -> ChainPlan {
    const RandomScope random{GeneratorStates()};
    const FrozenBuffers frozen(buffers);
    const RecordingScope unrecorded(nullptr);
    const SavingScope measuring("CheckpointedSequential", [] { return nullptr; });
    const FrozenBuffers captured(captured_buffers(modules, buffers, input, context));
    const auto stages = std::make_shared<Stages>(merged(modules, input, context));
    auto costs = costs_of(*stages, input, options, context);
    const auto least = least_memory(costs);
    return {std::move(scope), stages, std::move(costs), least};
  }();
  check_not_replaced(buffers);
  return plan;
}

/// Completes a plan. If all tensors are `growth` times as large, divides the budget by that, and by 1.25 more, because
/// kernels may use other algorithms for other sizes.
GRADACCUM_INLINE std::shared_ptr<const ChainPlan> planned(ChainPlan plan, double growth, std::int64_t budget) {
  plan.growth = growth;
  if (growth > 1) growth *= 1.25;
  plan.schedule = std::make_shared<const Schedule>(
      fastest_schedule(plan.costs, static_cast<std::int64_t>(static_cast<double>(budget) / growth)));
  const auto larger = [&](std::int64_t bytes) {
    return static_cast<std::int64_t>(static_cast<double>(bytes) * growth);
  };
  const auto cost = [&](const Schedule& schedule) -> CheckpointPlan::Cost {
    const auto once = cost_of(schedule, plan.costs);
    return {larger(once.peak), once.seconds * growth};
  };
  plan.description = {to_string(by_module(*plan.schedule, *plan.stages)), budget, cost(*plan.schedule),
                      cost(keep_everything(plan.costs)), larger(plan.least)};
  return std::make_shared<const ChainPlan>(std::move(plan));
}

/// Divides stages evenly into segments. The last is kept, since it would be recomputed immediately.
GRADACCUM_INLINE Schedule even_segments(std::int64_t segments, std::int64_t size) {
  const auto count = std::max<std::int64_t>(segments, 1);
  Schedule schedule;
  for (std::int64_t segment = 0, stage = 0; segment < count; ++segment) {
    Schedule stages;
    for (; stage < (segment + 1) * size / count; ++stage) stages.push_back({static_cast<std::size_t>(stage), 0, {}});
    if (segment + 1 == count)
      schedule.insert(schedule.end(), stages.begin(), stages.end());
    else
      schedule.push_back({0, 0, std::move(stages)});
  }
  return schedule;
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const CheckpointPlan& plan) {
  const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  if (plan.memory_budget)
    out << fmt::format(
        "budget {:.2f} MiB: peak {:.2f} MiB (plain {:.2f}, least {:.2f}), {:+.1f} % time ({:.2f} ms, plain {:.2f})\n",
        mib(*plan.memory_budget), mib(plan.predicted.peak_bytes), mib(plan.plain.peak_bytes), mib(plan.least_bytes),
        100 * (plan.predicted.seconds / plan.plain.seconds - 1), 1e3 * plan.predicted.seconds,
        1e3 * plan.plain.seconds);
  return out << "schedule: " << plan.schedule << '\n';
}

struct CheckpointedSequentialImpl::State {
  torch::nn::Sequential sequential;
  CheckpointedSequentialOptions options;
  detail::Segment segments;  // stages by segment; one kept segment with a budget
  bool or_least = false;     // a plan may exceed the budget if none fits
  std::mutex mutex = {};     // protects the plans
  std::vector<std::shared_ptr<const detail::ChainPlan>> plans = {};  // for a budget, by kind of input
  std::shared_ptr<const detail::ChainPlan> latest = {};

  std::shared_ptr<const detail::ChainPlan> plan_for(const at::Tensor& input, const at::Tensor& context) {
    const std::lock_guard lock(mutex);
    auto scope = detail::scope_of(*segments.stages, input, context);
    const auto budget = options.memory_budget;
    const auto growth = [&](auto& plan) { return plan->scope.growth(scope); };
    const auto known = std::ranges::find_if(plans, [&](auto& plan) { return growth(plan) <= plan->growth; });
    if (known != plans.end()) return latest = *known;
    constexpr int exact = 4;  // measured plans before scaling, which uses less than the budget
    const auto is_exact = [&](auto& plan) { return plan->growth == 1 && plan->scope.properties == scope.properties; };
    const bool scales = std::ranges::count_if(plans, is_exact) >= exact;
    const auto nearest = std::ranges::min_element(plans, {}, growth);
    const double needed = scales ? growth(*nearest) : std::numeric_limits<double>::infinity();
    double larger = 1.25;  // rounded up, so that there are few plans
    while (larger < needed && larger < 1.9) larger *= 1.25;
    if (needed <= larger)
      larger = std::min(larger, 0.8 * static_cast<double>(budget) / static_cast<double>((*nearest)->least + 1));
    if (needed <= larger) {
      latest = detail::planned(**nearest, larger, budget);
    } else {
      auto plan = detail::measured(*segments.stages, options.checkpoint, std::move(scope), input, context);
      TORCH_CHECK_WITH(OutOfMemoryError, budget >= plan.least || or_least,
                       "CheckpointedSequential: memory_budget must be at least ", plan.least,
                       " bytes for an input that is ", detail::TensorTraits(input), ", got ", budget);
      const auto least = plan.least;
      latest = detail::planned(std::move(plan), 1, std::max(budget, least));
    }
    plans.push_back(latest);  // last: an input that has a plan keeps it when it is recomputed
    return latest;
  }
};

GRADACCUM_INLINE CheckpointedSequentialImpl::CheckpointedSequentialImpl(torch::nn::Sequential stages,
                                                                        const CheckpointedSequentialOptions& options)
    : Module("CheckpointedSequential") {
  const auto size = static_cast<std::int64_t>(stages->size());
  TORCH_CHECK(size > 0, "CheckpointedSequential: the Sequential must have modules, got none");
  TORCH_CHECK((options.segments != 0) != (options.memory_budget != 0),
              "CheckpointedSequential: exactly one of segments and memory_budget must be given, got segments = ",
              options.segments, " and memory_budget = ", options.memory_budget);
  TORCH_CHECK(options.memory_budget >= 0, "CheckpointedSequential: memory_budget must be > 0 bytes, got ",
              options.memory_budget);
  TORCH_CHECK(options.segments >= 0 && options.segments <= size, "CheckpointedSequential: segments must be 1 to ", size,
              ", the number of modules, got ", options.segments);
  const auto schedule = std::make_shared<const detail::Schedule>(detail::even_segments(options.segments, size));
  const auto modules = std::make_shared<detail::Stages>(stages->begin(), stages->end());
  for (auto& stage : stages->named_children()) register_module(stage.key(), stage.value());
  state_.reset(new State{std::move(stages), options, {modules, schedule, options.checkpoint}});
}

GRADACCUM_INLINE CheckpointedSequentialImpl::~CheckpointedSequentialImpl() = default;

GRADACCUM_INLINE at::Tensor CheckpointedSequentialImpl::forward(const at::Tensor& input, const at::Tensor& context) {
  TORCH_CHECK(!context.defined() || !context.requires_grad(),
              "CheckpointedSequential: the context must not require grad, since no gradient would reach it; detach() "
              "it, or pass it to the modules as a part of their input");
  auto chain = state_->segments;
  chain.context = context;
  if (options().memory_budget == 0 || !at::GradMode::is_enabled()) return chain(input);
  // Disables autocast's cache, which would keep casts of all parameters beyond their stages, until its scope ends.
  const auto device = input.device().type();
  std::optional<Autocast> uncached;
  if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device))
    uncached.emplace(device, at::autocast::get_autocast_dtype(device), /*enabled=*/true, /*cache_enabled=*/false);
  const auto plan = state_->plan_for(input, context);
  chain.stages = plan->stages;
  chain.schedule = plan->schedule;
  return chain(input);
}

GRADACCUM_INLINE void CheckpointedSequentialImpl::set_memory_budget(std::int64_t bytes, bool or_least) {
  TORCH_CHECK(options().segments == 0, "CheckpointedSequential: it has segments, so memory_budget cannot be set");
  TORCH_CHECK(bytes >= 0, "CheckpointedSequential: memory_budget must be >= 0 bytes, got ", bytes);
  const std::lock_guard lock(state_->mutex);
  state_->options.memory_budget = bytes;
  state_->or_least = or_least;
  for (auto& plan : std::exchange(state_->plans, {}))  // keeps measured costs
    if (plan->growth == 1 && (bytes == 0 || or_least || bytes >= plan->least))
      state_->plans.push_back(bytes == 0 ? plan : detail::planned(*plan, 1, std::max(bytes, plan->least)));
  state_->latest.reset();
}

GRADACCUM_INLINE const CheckpointedSequentialOptions& CheckpointedSequentialImpl::options() const {
  return state_->options;
}

GRADACCUM_INLINE bool CheckpointedSequentialImpl::has_plan() const {
  const std::lock_guard lock(state_->mutex);
  return state_->options.memory_budget == 0 || state_->latest;
}

GRADACCUM_INLINE CheckpointPlan CheckpointedSequentialImpl::plan() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->options.memory_budget == 0) return {detail::to_string(*state_->segments.schedule), {}, {}, {}, 0};
  TORCH_CHECK(state_->latest,
              "CheckpointedSequential: there is no plan yet; run a forward pass with gradients first, which measures "
              "the stages");
  return state_->latest->description;
}

GRADACCUM_INLINE std::shared_ptr<torch::nn::Module> CheckpointedSequentialImpl::clone(
    const std::optional<at::Device>& device) const {
  auto stages = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(state_->sequential->clone(device));
  auto options = this->options();
  const bool keeps_all = options.segments == 0 && options.memory_budget == 0;  // which options cannot express
  if (keeps_all) options.memory_budget = 1;
  auto copy = std::make_shared<CheckpointedSequentialImpl>(torch::nn::Sequential(std::move(stages)), options);
  if (keeps_all) copy->set_memory_budget(0);
  copy->state_->or_least = state_->or_least;
  return copy;
}

GRADACCUM_INLINE void CheckpointedSequentialImpl::pretty_print(std::ostream& out) const {
  out << "gradaccum::CheckpointedSequential";
}

GRADACCUM_INLINE CheckpointedSequential::CheckpointedSequential(torch::nn::Sequential stages,
                                                                const CheckpointedSequentialOptions& options)
    : ModuleHolder(std::make_shared<CheckpointedSequentialImpl>(std::move(stages), options)) {}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
