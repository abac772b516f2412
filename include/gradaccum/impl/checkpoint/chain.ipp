// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <ostream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void Stage::append(const Stage& other) {
  modules_.insert(modules_.end(), other.modules_.begin(), other.modules_.end());
}

GRADACCUM_INLINE Stage Stage::given(const at::Tensor& context) const {
  Stage stage = *this;
  stage.context_ = context;
  return stage;
}

GRADACCUM_INLINE at::Tensor Stage::forward(std::size_t way, at::Tensor activations) {
  std::optional<RebuildingScope> rebuilding;
  if (way > 0) rebuilding.emplace();
  for (auto& module : modules_)
    activations = context_.defined() ? module.forward(std::move(activations), at::Tensor(context_))
                                     : module.forward(std::move(activations));
  return activations;
}

GRADACCUM_INLINE at::Tensor Stage::forward_in_checkpoint(std::size_t way, at::Tensor activations) {
  const FrozenStatistics frozen(Recomputation::active() ? modules() : std::vector<torch::nn::Module*>());
  return forward(way, std::move(activations));
}

GRADACCUM_INLINE std::vector<torch::nn::Module*> Stage::modules() const {
  std::vector<torch::nn::Module*> modules;
  for (auto& module : modules_) modules.push_back(module.ptr().get());
  return modules;
}

GRADACCUM_INLINE std::vector<torch::nn::Module*> modules_of(const Stages& stages) {
  std::vector<torch::nn::Module*> modules;
  for (auto& stage : stages)
    for (auto* module : stage.modules()) modules.push_back(module);
  return modules;
}

GRADACCUM_INLINE Stages given(const Stages& stages, const at::Tensor& context) {
  Stages all;
  for (auto& stage : stages) all.push_back(stage.given(context));
  return all;
}

GRADACCUM_INLINE Segment Segment::given(const at::Tensor& context) const {
  if (!context.defined()) return *this;
  return {std::make_shared<Stages>(detail::given(*stages_, context)), schedule_, options_};
}

GRADACCUM_INLINE at::Tensor Segment::operator()(at::Tensor activations) const {
  for (auto& item : *schedule_) {
    if (item.segment.empty()) {
      auto& stage = (*stages_)[item.stage];
      activations = options_.check_content ? stage.forward(item.way, std::move(activations))
                                           : stage.forward_in_checkpoint(item.way, std::move(activations));
    } else {
      activations = run_checkpointed(options_, inside(item), std::exchange(activations, {}));
    }
  }
  return activations;
}

GRADACCUM_INLINE std::vector<torch::nn::Module*> Segment::modules() const {
  std::vector<torch::nn::Module*> modules;
  if (!options_.check_content) return modules;
  for (auto& item : *schedule_) {
    const auto more = item.segment.empty() ? (*stages_)[item.stage].modules() : inside(item).modules();
    modules.insert(modules.end(), more.begin(), more.end());
  }
  return modules;
}

/// Translates a schedule of merged stages to modules of the chain, for display.
GRADACCUM_INLINE Schedule by_module(const Schedule& schedule, const Stages& stages) {
  std::vector<std::size_t> first{0};
  for (auto& stage : stages) first.push_back(first.back() + stage.size());
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

/// Dimensions from the outermost in memory to the innermost. Operations copy inputs that they need in another order.
GRADACCUM_INLINE std::vector<std::int64_t> order_in_memory(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_contiguous()) return {};
  std::vector<std::int64_t> order(static_cast<std::size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](auto dimension) { return tensor.stride(dimension); });
  order.push_back(tensor.is_non_overlapping_and_dense());
  return order;
}

GRADACCUM_INLINE PlanScope::PlanScope(const Stages& stages, const at::Tensor& input, const at::Tensor& context)
    : shape_(input.sizes()), order_(order_in_memory(input)), device_(input.device()) {
  dtypes_ = {input.scalar_type(), at::autocast::get_autocast_dtype(device_.type())};
  if (context.defined()) {
    context_shape_ = context.sizes();
    dtypes_.push_back(context.scalar_type());
  }
  flags_ = {input.requires_grad(), at::autocast::is_autocast_enabled(device_.type())};
  for (auto* module : modules_of(stages)) {
    for (auto& part : module->modules()) flags_.push_back(part->is_training());
    for (auto& parameter : module->parameters()) {
      flags_.push_back(parameter.requires_grad());
      dtypes_.push_back(parameter.scalar_type());
    }
  }
}

GRADACCUM_INLINE bool is_no_smaller(const at::DimVector& shape, const at::DimVector& other) {
  return std::ranges::equal(shape, other, std::greater_equal<>());
}

GRADACCUM_INLINE bool PlanScope::covers(const PlanScope& other) const {
  return is_no_smaller(shape_, other.shape_) && is_no_smaller(context_shape_, other.context_shape_) &&
         order_ == other.order_ && device_ == other.device_ && dtypes_ == other.dtypes_ && flags_ == other.flags_;
}

/// Makes operations save tensors as LibTorch does, for a scope. An outer checkpoint must not see tensors of a
/// measurement, since its recomputation does not repeat the measurement.
class [[nodiscard]] MeasuringScope final : SavingScope {
 public:
  MeasuringScope() : SavingScope("CheckpointedSequential") {}

 private:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return nullptr; }
};

GRADACCUM_INLINE std::shared_ptr<const PlannedChain::Planned> PlannedChain::plan_for(const at::Tensor& input,
                                                                                     const at::Tensor& context) {
  const std::lock_guard lock(mutex_);
  PlanScope scope(stages_, input, context);
  const auto known = std::ranges::find_if(plans_, [&](auto& plan) { return plan->scope.covers(scope); });
  if (known != plans_.end()) return latest_ = *known;
  latest_ = make(std::move(scope), input, context);
  plans_.push_back(latest_);  // last: an input that has a plan keeps it when it is recomputed
  return latest_;
}

GRADACCUM_INLINE std::shared_ptr<const PlannedChain::Planned> PlannedChain::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

/// Leaves random generators, running statistics and gradients unchanged, and is invisible to outer hooks.
GRADACCUM_INLINE std::shared_ptr<const PlannedChain::Planned> PlannedChain::make(PlanScope scope,
                                                                                 const at::Tensor& input,
                                                                                 const at::Tensor& context) const {
  const RandomScope random{RandomState()};
  const FrozenStatistics frozen(modules_of(stages_));
  const MeasuringScope measuring;
  const auto stages = std::make_shared<Stages>(merged(given(stages_, context), input));
  const auto costs = costs_of(*stages, input, options_);
  const auto least = least_memory(costs);
  TORCH_CHECK_WITH(OutOfMemoryError, budget_ >= least, "CheckpointedSequential: memory_budget must be at least ", least,
                   " bytes for an input that is ", TensorTraits(input), ", got ", budget_);
  const auto schedule = std::make_shared<const Schedule>(fastest_schedule(costs, budget_));
  const auto cost = [&](const Schedule& s) { return CheckpointPlan::Cost{peak_bytes(s, costs), seconds(s, costs)}; };
  return std::make_shared<Planned>(Planned{
      std::move(scope),
      Segment(std::make_shared<Stages>(given(*stages, {})), schedule, options_),
      {to_string(by_module(*schedule, *stages)), budget_, cost(*schedule), cost(keep_everything(costs)), least},
  });
}

GRADACCUM_INLINE void AllocationLog::reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated,
                                                       std::size_t reserved, c10::Device device) {
  MemoryLedger::reportMemoryUsage(block, bytes, allocated, reserved, device);
  const std::lock_guard lock(mutex_);
  if (bytes > 0) {
    born_[block] = entries_.size();
    entries_.push_back({bytes, 0});
  } else if (const auto born = born_.find(block); born != born_.end()) {  // other blocks are older than the scope
    entries_.push_back({-entries_[born->second].bytes, born->second});
    born_.erase(born);
  }
}

GRADACCUM_INLINE bool AllocationLog::has(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return born_.contains(const_cast<void*>(tensor.storage().data()));
}

GRADACCUM_INLINE std::size_t AllocationLog::now() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

GRADACCUM_INLINE void AllocationLog::leave_out(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (tensor.is_sparse()) {
    leave_out(tensor._indices());
    return leave_out(tensor._values());
  }
  const std::lock_guard lock(mutex_);
  const auto born = born_.find(tensor.storage().mutable_data());
  if (born != born_.end()) skipped_steps_.push_back(born->second);
}

GRADACCUM_INLINE AllocationLog::Bytes AllocationLog::between(std::size_t from, std::size_t to) const {
  const std::lock_guard lock(mutex_);
  Bytes bytes;
  for (std::size_t i = 0; i < to; ++i) {
    const auto& entry = entries_[i];
    if (std::ranges::find(skipped_steps_, entry.bytes > 0 ? i : entry.born) == skipped_steps_.end())
      bytes.live += entry.bytes;
    bytes.peak = i < from ? bytes.live : std::max(bytes.peak, bytes.live);
  }
  return bytes;
}

GRADACCUM_INLINE AllocationScope::AllocationScope(const char* impossible)
    : log_(std::make_shared<AllocationLog>(MemoryLedger::innermost(impossible))),
      guard_(c10::DebugInfoKind::PROFILER_STATE, log_) {}

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

/// Removes the hooks of leaves for a scope, so that they do not see gradients that are only measured.
class [[nodiscard]] HooksAway {
 public:
  explicit HooksAway(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)), hooks_(leaves_.size()) {
    for (std::size_t i = 0; i < leaves_.size(); ++i) exchange(i);
  }
  HooksAway(const HooksAway&) = delete;
  HooksAway& operator=(const HooksAway&) = delete;
  ~HooksAway() {
    for (auto i = leaves_.size(); i-- > 0;) exchange(i);  // in reverse: a leaf may be listed twice
  }

 private:
  void exchange(std::size_t i) { std::swap(torch::autograd::impl::hooks(leaves_[i]), hooks_[i]); }

  std::vector<at::Tensor> leaves_;
  std::vector<std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>> hooks_;
};

class StageMeasurement {
 public:
  StageMeasurement(Stage& stage, const at::Tensor& input, at::Tensor gradient_layout, bool last,
                   const CheckpointOptions& options)
      : stage_(stage), input_(input), gradient_layout_(std::move(gradient_layout)), last_(last), options_(options) {
    options_.check_content = false;  // each run changes statistics that operations save
    if (input.requires_grad()) sources_.push_back(input.detach().requires_grad_());
    for (auto* module : stage.modules())
      for (auto& parameter : module->parameters())
        if (parameter.requires_grad()) sources_.push_back(parameter);
  }

  StageProfile profile() {
    auto cost = measure();
    const at::NoGradGuard keep_nothing;
    return {std::move(cost), stage_.forward(0, input_).requires_grad_(output_requires_grad_), gradient_layout_,
            input_gradient_layout_};
  }

 private:
  static constexpr int fewest_runs = 3,
                       most_runs = 10;  // the first warms up; runs of small stages are short and noisy
  static constexpr double enough_seconds = 0.05;

  StageCost measure() {
    StageCost cost;
    const StopWatch watch(input_.device());
    for (int run = 0; run < fewest_runs || (run < most_runs && watch.seconds() < enough_seconds); ++run) {
      if (run < 2) cost = {.ways = std::vector<StageCost::Way>(2)};  // drops the warm-up, whose allocations may stay
      for (std::size_t way = 0; way < cost.ways.size(); ++way) {
        measure_dropped(cost, way);
        measure_kept(cost.ways[way], way);
      }
    }
    if (cost.ways[1].held >= cost.ways[0].held) cost.ways.pop_back();
    for (auto& way : cost.ways)  // takes no longer than all of forward, but for noise
      way.again_seconds = std::min(way.again_seconds, cost.forward_seconds);
    return cost;
  }

  at::Tensor input() const { return input_.requires_grad() ? GradientSink::apply(sources_.front()) : input_; }

  void measure_kept(StageCost::Way& way, std::size_t number) {
    AllocationScope log;
    at::Tensor output = [&] {
      const FrozenStatistics frozen(stage_.modules());  // as in a recomputation, where operations save the copies
      return stage_.forward(number, input());
    }();
    if (last_) log->leave_out(output);
    const auto forward = log->between(0, log->now());
    const auto [backward, seconds] = run_backward(*log, std::move(output));
    more(way.held, forward.live);
    more(way.forward_peak, forward.peak);
    more(way.backward_peak, backward.peak);
    less(way.backward_seconds, seconds);
  }

  void measure_dropped(StageCost& cost, std::size_t number) {
    AllocationScope log;
    const StopWatch watch(input_.device());
    Again again{*log, StopWatch(input_.device())};
    at::Tensor output = run_checkpointed(
        options_,
        [&](const at::Tensor& input) {
          const Again::Run run(again);
          return stage_.forward_in_checkpoint(number, input);
        },
        input());
    less(cost.forward_seconds, watch.seconds());
    if (last_) log->leave_out(output);
    more(cost.forward_peak, log->between(0, log->now()).peak);
    more(cost.output, storage_bytes(output));
    auto& way = cost.ways[number];
    more(way.again_peak, run_backward(*log, std::move(output)).first.peak);
    less(way.again_seconds, again.seconds);
    more(cost.output_gradient, std::max(storage_bytes(gradient_layout_), log->between(0, again.begin).live));
  }

  /// The beginning and the duration of the function's second run.
  struct Again {
    const AllocationLog& log;
    StopWatch watch;
    int runs = 0;
    std::size_t begin = 0;
    double seconds = 0;

    struct Run {
      explicit Run(Again& a) : again(a), begun(a.watch.seconds()) {
        if (++again.runs == 2) again.begin = again.log.now();
      }
      ~Run() {
        if (again.runs == 2) again.seconds = again.watch.seconds() - begun;
      }
      Again& again;
      double begun;
    };
  };

  std::pair<AllocationLog::Bytes, double> run_backward(AllocationLog& log, at::Tensor output) {
    if (!gradient_layout_.defined()) gradient_layout_ = layout_of(at::empty_like(output, at::kMeta));
    output_requires_grad_ = output.requires_grad();
    if (!output_requires_grad_) return {};
    WeakStorage output_gradient = output.storage().getWeakStorageImpl();  // a stand-in until backward makes it
    const auto source = GradientSource::apply(output, gradient_layout_, &output_gradient);
    log.leave_out(source);
    output.reset();  // from here on only operations that need it own it
    const auto begin = log.now();
    const StopWatch watch(input_.device());
    const auto gradients = [&] {
      const HooksAway hooks_away(sources_);
      return torch::autograd::grad({source}, sources_, {}, /*retain_graph=*/false, /*create_graph=*/false,
                                   /*allow_unused=*/true);
    }();
    const double seconds = watch.seconds();
    leave_out_parameters(log, gradients, output_gradient);
    return {log.between(begin, log.now()), seconds};
  }

  /// Excludes gradients of parameters, except those that share the memory of a gradient passed through the stage.
  void leave_out_parameters(AllocationLog& log, const std::vector<at::Tensor>& gradients,
                            const WeakStorage& output_gradient) {
    const c10::StorageImpl* input_gradient = nullptr;
    if (input_.requires_grad() && gradients.front().defined()) {
      input_gradient_layout_ = layout_of(gradients.front());
      input_gradient = memory_of(gradients.front());
    }
    for (std::size_t i = input_.requires_grad(); i < gradients.size(); ++i) {
      const auto* const memory = memory_of(gradients[i]);
      if (memory != input_gradient && memory != output_gradient._unsafe_get_target()) log.leave_out(gradients[i]);
    }
  }
  static const c10::StorageImpl* memory_of(const at::Tensor& gradient) {
    return gradient.defined() && gradient.has_storage() ? gradient.storage().unsafeGetStorageImpl() : nullptr;
  }

  static void more(std::int64_t& most, std::int64_t bytes) { most = std::max(most, bytes); }
  static void less(double& least, double seconds) { least = least == 0 ? seconds : std::min(least, seconds); }

  Stage& stage_;
  at::Tensor input_;
  at::Tensor gradient_layout_, input_gradient_layout_;
  bool last_;
  CheckpointOptions options_;
  bool output_requires_grad_ = false;
  std::vector<at::Tensor> sources_;
};

GRADACCUM_INLINE StageProfile profile_of(Stage& stage, const at::Tensor& input, const at::Tensor& gradient_layout,
                                         bool last, const CheckpointOptions& options) {
  return StageMeasurement(stage, input, gradient_layout, last, options).profile();
}

/// The cost of a stage without gradients: neither its input nor its parameters require any. It saves nothing itself.
/// Its output, which the next stage may save, counts unless the stage is the last.
GRADACCUM_INLINE StageCost without_gradients(StageCost cost, bool is_last) {
  cost.ways = {{.held = is_last ? 0 : cost.output, .forward_peak = cost.forward_peak}};
  cost.output_gradient = 0;
  return cost;
}

/// The number of owners of a tensor and of its memory.
GRADACCUM_INLINE std::size_t owners(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.defined() && tensor.has_storage(),
      "CheckpointedSequential: with a memory_budget, the input and what modules return must be dense tensors, got ",
      tensor.defined() ? c10::str("one that is ", tensor.layout()) : "an undefined one");
  return tensor.use_count() + tensor.storage().use_count();
}

GRADACCUM_INLINE Stages merged(const Stages& stages, const at::Tensor& input) {
  Stages merged;
  auto activations = input.detach().requires_grad_(input.requires_grad());
  const TensorVersion input_version(activations);
  bool output_is_kept = true, has_gradients = false;
  for (auto stage : stages) {
    if (activations.requires_grad()) activations = GradientSink::apply(activations);  // a leaf has another owner
    const auto before = owners(activations);
    const TensorVersion version(activations);
    auto output = stage.forward(0, activations);
    has_gradients |= output.requires_grad();
    const bool is_apart = output_is_kept || owners(activations) > before;
    if (merged.empty() || (is_apart && has_gradients && !version.changed()))
      merged.push_back(stage);
    else
      merged.back().append(stage);
    output_is_kept = owners(output) > 2;  // this handle and its reference to the storage
    activations = output.detach().requires_grad_(output.requires_grad());
  }
  TORCH_CHECK(!input_version.changed(),
              "CheckpointedSequential: the first module must leave its input as it is, and changes it in place; use "
              "the module without inplace");
  return merged;
}

class ChainProfile {
 public:
  ChainProfile(Stages& stages, const CheckpointOptions& options)
      : stages_(stages), options_(options), gradient_layouts_(stages.size()), has_gradients_(stages.size()) {}

  StageCosts measure(const at::Tensor& input) {
    // Repeats with the layouts of gradients that the following stages turned out to produce.
    for (int pass = 0; measure_all(input) && pass < 2; ++pass) {
    }
    if (!has_gradients_.front()) costs_.front() = without_gradients(std::move(costs_.front()), costs_.size() == 1);
    return std::move(costs_);
  }

 private:
  /// Returns whether a gradient's layout differs from the one assumed.
  bool measure_all(at::Tensor input) {
    bool surprised = false;
    costs_.clear();
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      auto profile = profile_of(stages_[i], input, gradient_layouts_[i], i + 1 == stages_.size(), options_);
      costs_.push_back(std::move(profile.cost));
      gradient_layouts_[i] = profile.gradient_layout;
      if (const auto& layout = profile.input_gradient_layout; i > 0 && layout.defined()) {
        surprised |= !same_layout(layout, gradient_layouts_[i - 1]);
        gradient_layouts_[i - 1] = layout;
      }
      input = std::move(profile.output);
      has_gradients_[i] = input.requires_grad();
    }
    return surprised;
  }

  Stages& stages_;
  CheckpointOptions options_;
  std::vector<at::Tensor> gradient_layouts_;
  std::vector<bool> has_gradients_;
  StageCosts costs_;
};

GRADACCUM_INLINE StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options) {
  return ChainProfile(stages, options).measure(input);
}

}  // namespace gradaccum::detail

namespace gradaccum {

namespace detail {

GRADACCUM_INLINE void check_options(const CheckpointedSequentialOptions& options, std::int64_t size) {
  TORCH_CHECK(size > 0, "CheckpointedSequential: the Sequential must have modules, got none");
  TORCH_CHECK((options.segments != 0) != (options.memory_budget != 0),
              "CheckpointedSequential: either segments or memory_budget must be given, got segments = ",
              options.segments, " and memory_budget = ", options.memory_budget);
  TORCH_CHECK(options.memory_budget >= 0, "CheckpointedSequential: memory_budget must be > 0 bytes, got ",
              options.memory_budget);
  TORCH_CHECK(options.segments >= 0 && options.segments <= size, "CheckpointedSequential: segments must be 1 to ", size,
              ", the number of modules, got ", options.segments);
}

/// Divides stages evenly into segments. The last is kept, since it would be recomputed at once.
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

/// The stages of a `CheckpointedSequential`, with its schedule by segments, or with plans for its budget.
class CheckpointedChain {
 public:
  CheckpointedChain(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options)
      : sequential_(std::move(stages)), options_(options) {
    const auto size = static_cast<std::int64_t>(sequential_->size());
    check_options(options, size);
    const auto modules = std::make_shared<Stages>(sequential_->begin(), sequential_->end());
    schedule_ = std::make_shared<const Schedule>(even_segments(options.segments, size));
    segments_.emplace(modules, schedule_, options.checkpoint);
    if (options.memory_budget > 0) planned_.emplace(*modules, options.memory_budget, options.checkpoint);
  }

  const torch::nn::Sequential& sequential() const { return sequential_; }
  const CheckpointedSequentialOptions& options() const { return options_; }

  void set_memory_budget(std::int64_t bytes) {
    TORCH_CHECK(options_.segments == 0, "CheckpointedSequential: it has segments, and memory_budget is another way");
    TORCH_CHECK(bytes >= 0, "CheckpointedSequential: memory_budget must be >= 0 bytes, got ", bytes);
    options_.memory_budget = bytes;
    planned_.reset();
    if (bytes > 0) planned_.emplace(Stages(sequential_->begin(), sequential_->end()), bytes, options_.checkpoint);
  }

  at::Tensor operator()(const at::Tensor& input, const at::Tensor& context) {
    TORCH_CHECK(!context.defined() || !context.requires_grad(),
                "CheckpointedSequential: the context must not require gradients, as none would reach it; got one that "
                "does: detach() it, or give it to the modules by their input");
    if (!planned_ || !at::GradMode::is_enabled()) return segments_->given(context)(input);
    // Disables autocast's cache, which would keep casts of all parameters beyond their stages, until its scope ends.
    const auto device = input.device().type();
    std::optional<Autocast> uncached;
    if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device))
      uncached.emplace(device, at::autocast::get_autocast_dtype(device), /*enabled=*/true, /*cache_enabled=*/false);
    return planned_->plan_for(input, context)->chain.given(context)(input);
  }

  bool has_plan() const { return !planned_ || planned_->latest(); }
  CheckpointPlan plan() const {
    if (!planned_) return {to_string(*schedule_), {}, {}, {}, 0};
    const auto latest = planned_->latest();
    TORCH_CHECK(latest,
                "CheckpointedSequential: there is no plan before the first forward pass with gradients, which "
                "measures the stages");
    return latest->plan;
  }

 private:
  torch::nn::Sequential sequential_;
  CheckpointedSequentialOptions options_;
  std::shared_ptr<const Schedule> schedule_;  // schedule by segments
  std::optional<Segment> segments_;           // stages with that schedule
  std::optional<PlannedChain> planned_;       // plans, if there is a budget
};

}  // namespace detail

GRADACCUM_INLINE CheckpointedSequentialImpl::CheckpointedSequentialImpl(torch::nn::Sequential stages,
                                                                        const CheckpointedSequentialOptions& options)
    : Module("CheckpointedSequential"),
      chain_(std::make_unique<detail::CheckpointedChain>(std::move(stages), options)) {
  for (auto& stage : chain_->sequential()->named_children()) register_module(stage.key(), stage.value());
}

GRADACCUM_INLINE CheckpointedSequentialImpl::~CheckpointedSequentialImpl() = default;

GRADACCUM_INLINE at::Tensor CheckpointedSequentialImpl::forward(const at::Tensor& input, const at::Tensor& context) {
  return (*chain_)(input, context);
}

GRADACCUM_INLINE void CheckpointedSequentialImpl::set_memory_budget(std::int64_t bytes) {
  chain_->set_memory_budget(bytes);
}
GRADACCUM_INLINE const CheckpointedSequentialOptions& CheckpointedSequentialImpl::options() const {
  return chain_->options();
}

GRADACCUM_INLINE CheckpointPlan CheckpointedSequentialImpl::plan() const { return chain_->plan(); }

GRADACCUM_INLINE bool CheckpointedSequentialImpl::has_plan() const { return chain_->has_plan(); }

GRADACCUM_INLINE std::shared_ptr<torch::nn::Module> CheckpointedSequentialImpl::clone(
    const std::optional<at::Device>& device) const {
  auto stages = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(chain_->sequential()->clone(device));
  return std::make_shared<CheckpointedSequentialImpl>(torch::nn::Sequential(std::move(stages)), chain_->options());
}

GRADACCUM_INLINE void CheckpointedSequentialImpl::pretty_print(std::ostream& out) const {
  out << "gradaccum::CheckpointedSequential";
}

GRADACCUM_INLINE CheckpointedSequential::CheckpointedSequential(torch::nn::Sequential stages,
                                                                const CheckpointedSequentialOptions& options)
    : ModuleHolder(std::make_shared<CheckpointedSequentialImpl>(std::move(stages), options)) {}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
