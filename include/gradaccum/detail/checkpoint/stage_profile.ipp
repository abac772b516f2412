// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/stage_profile.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/allocation_log.hpp>
#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
#include <gradaccum/detail/checkpoint/gradient_source.hpp>
#include <gradaccum/detail/checkpoint/run_checkpointed.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

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

}  // namespace gradaccum::detail
