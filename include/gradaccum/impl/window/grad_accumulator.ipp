// SPDX-License-Identifier: Apache-2.0
// Implements the accumulator: its window, clipping and step.
#pragma once

#include <gradaccum/grad_accumulator.hpp>

#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>

#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE Accumulator::Accumulator(std::unique_ptr<detail::AnyOptimizer> optimizer,
                                          const GradAccumulatorOptions& options)
    : window_(std::make_unique<detail::OpenWindow>(std::move(optimizer), options.steps, options.accumulate_in)) {
  for (auto& [name, wrapped] : window_->optimizer().members)
    detail::check_can_be_wrapped(wrapped, "GradAccumulator", "set_steps(n) changes its window");
  window_->set_in_backward(options.in_backward);
}

GRADACCUM_INLINE Accumulator::~Accumulator() {
  if (!window_ || updates_ > 0 || warned_of_nothing_ || std::uncaught_exceptions() > 0) return;
  const auto what = micro_steps() > 0
                        ? c10::str("its only window has ", micro_steps(), " of ", window_->steps(),
                                   " micro-batches: call flush() after the loop, and step() once a micro-batch")
                    : cleared_ && !stepped_
                        ? "its step() was never called: call it in place of the wrapped optimizer's, before zero_grad()"
                        : std::string();
  try {
    if (!what.empty()) TORCH_WARN("GradAccumulator: it never moved a parameter, and ", what);
  } catch (...) {  // a handler of warnings may throw, and a destructor must not
  }
}

GRADACCUM_INLINE Accumulator::Accumulator(Accumulator&& other)
    : cleared_(other.cleared_),
      stepped_(other.stepped_),
      warned_of_nothing_(other.warned_of_nothing_),
      updates_(other.updates_),
      clip_norm_(other.clip_norm_),
      clip_value_(other.clip_value_) {
  TORCH_CHECK(other.micro_steps() == 0 && !other.window_->in_hand(),
              "GradAccumulator: must be moved between windows, but a window is open; call flush() or discard() first");
  TORCH_CHECK(!other.facade_,
              "GradAccumulator: cannot be moved after it was used as a torch::optim::Optimizer&, such as by a "
              "scheduler; move it before");
  grad_norm_ = std::move(other.grad_norm_);
  window_ = std::move(other.window_);
}

GRADACCUM_INLINE std::unique_lock<std::recursive_mutex> Accumulator::turn(bool begins) {
  std::unique_lock lock(turn_, std::try_to_lock);
  if (lock.owns_lock() && !window_->in_hand()) in_hand_of_ = std::thread::id();
  TORCH_CHECK(
      lock.owns_lock() && (!begins || in_hand_of_ == std::thread::id() || in_hand_of_ == std::this_thread::get_id()),
      "GradAccumulator: a thread made a call while another was in a call, or between its backward and step(); forward "
      "passes may run concurrently, but each thread must hold one lock (a std::mutex of yours) from backward to "
      "zero_grad(); discard() drops a micro-batch of another thread");
  return lock;
}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph) {
  backward(std::move(loss), BackwardOptions{.retain_graph = retain_graph, .create_graph = create_graph});
}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, const BackwardOptions& options) {
  const auto lock = turn(/*begins=*/true);
  in_hand_of_ = std::this_thread::get_id();
  refresh_parameters();
  window_->backward(std::move(loss), options, ready());
}

GRADACCUM_INLINE StepResult Accumulator::step() {
  const auto lock = turn(/*begins=*/false);
  stepped_ = true;
  refresh_parameters();
  window_->complete_micro_batch();
  if (!window_->full()) return StepResult::accumulated;
  return close();
}

/// Warns about an empty window only if no earlier one has stepped. Later ones may be intended, as for a generator that
/// pauses.
GRADACCUM_INLINE StepResult Accumulator::close() {
  clip();
  const bool has_weight = window_->has_weight();
  const auto result = window_->close();
  updates_ += result;
  if (result == StepResult::empty && has_weight && updates_ == 0 && !std::exchange(warned_of_nothing_, true))
    TORCH_WARN(
        "GradAccumulator: a window closed without a gradient for any parameter of the optimizer, so nothing "
        "moved. Call backward() before step(); make the optimizer for the parameters that the loss depends on, "
        "not for those of a copy of the model; see that they are not frozen");
  return result;
}

GRADACCUM_INLINE at::Tensor Accumulator::step(const torch::optim::Optimizer::LossClosure& closure) {
  const auto loss = detail::loss_of(closure);
  step();
  return loss;
}

GRADACCUM_INLINE void Accumulator::zero_grad(bool set_to_none) {
  const auto lock = turn(/*begins=*/true);
  cleared_ = true;
  window_->zero_grad(set_to_none);
}

GRADACCUM_INLINE StepResult Accumulator::flush() {
  const auto lock = turn(/*begins=*/false);
  refresh_parameters();
  if (!window_->complete_early()) return StepResult::empty;
  const auto result = close();
  window_->clear();
  return result;
}

GRADACCUM_INLINE void Accumulator::discard() {
  const auto lock = turn(/*begins=*/false);
  window_->discard();
  clip_norm_.reset();
  clip_value_.reset();
}

GRADACCUM_INLINE void Accumulator::clip_grad_norm_(double max_norm) {
  TORCH_CHECK(max_norm > 0, "GradAccumulator: max_norm must be > 0, got ", max_norm);
  check_can_clip();
  clip_norm_ = max_norm;
}

GRADACCUM_INLINE void Accumulator::clip_grad_value_(double clip_value) {
  TORCH_CHECK(clip_value >= 0, "GradAccumulator: clip_value must be >= 0, got ", clip_value);
  check_can_clip();
  clip_value_ = clip_value;
}

GRADACCUM_INLINE const at::Tensor& Accumulator::grad_norm() const {
  TORCH_CHECK(grad_norm_.defined(),
              "GradAccumulator: grad_norm() needs a closed window for which clip_grad_norm_(max) was called; a max of "
              "infinity only measures");
  return grad_norm_;
}

GRADACCUM_INLINE Gradients Accumulator::gradients() {
  const auto lock = turn(/*begins=*/false);
  refresh_parameters();
  return window_->so_far()->handle();
}

GRADACCUM_INLINE Accumulator::NamedWindow Accumulator::named_window(const torch::nn::Module& module) {
  refresh_parameters();
  return {*this, module};
}

GRADACCUM_INLINE void Accumulator::NamedWindow::state(Archive& archive) {
  auto updates = of.updates_;
  auto clip_norm = of.clip_norm_, clip_value = of.clip_value_;
  archive.setting("steps", of.window_->steps());
  archive("updates", updates);
  archive("clip_norm", clip_norm);
  archive("clip_value", clip_value);
  of.window_->named(module).state(archive);
  if (!archive.loading()) return;
  archive.when_all_fit([=, of = &of] {
    of->updates_ = updates;
    of->clip_norm_ = clip_norm;
    of->clip_value_ = clip_value;
  });
}

GRADACCUM_INLINE bool Accumulator::ready() const { return window_->ready(); }
GRADACCUM_INLINE std::int64_t Accumulator::micro_steps() const { return window_->micro_steps(); }
GRADACCUM_INLINE std::int64_t Accumulator::updates() const { return updates_; }
GRADACCUM_INLINE void Accumulator::set_steps(std::int64_t steps) { window_->set_steps(steps); }
GRADACCUM_INLINE void Accumulator::set_peers(std::shared_ptr<detail::Communicator> peers) {
  window_->set_peers(std::move(peers));
}

GRADACCUM_INLINE std::shared_ptr<detail::Shards> Accumulator::shards() const {
  return window_->peers() ? window_->peers()->shards() : nullptr;
}

GRADACCUM_INLINE bool Accumulator::others_continue() {
  refresh_parameters();
  return window_->others_continue();
}

GRADACCUM_INLINE std::string Accumulator::description() const {
  return "Wrapping '" + window_->optimizer().name() + "' optimizer with gradient accumulation of " +
         std::to_string(window_->steps()) + (window_->steps() == 1 ? " step" : " steps");
}

GRADACCUM_INLINE void Accumulator::synchronize() const {
  if (facade_) facade_->synchronize();
}

GRADACCUM_INLINE torch::optim::Optimizer& Accumulator::facade_of(torch::optim::Optimizer& wrapped) {
  const auto step_and_clear = [this] {
    const auto lock = turn(/*begins=*/false);
    window_->keep_sums_apart();
    step();
    zero_grad();
  };
  if (!facade_)
    facade_ = std::make_unique<detail::OptimizerFacade>(wrapped, step_and_clear, [this] { check_can_be_saved(); });
  if (micro_steps() > 0) window_->keep_sums_apart();
  facade_->synchronize();
  return *facade_;
}

GRADACCUM_INLINE void Accumulator::check_can_be_saved() const {
  TORCH_CHECK(micro_steps() == 0,
              "GradAccumulator: torch::save saves only the wrapped optimizer's state, but there are ", micro_steps(),
              " micro-batches in the open window; save after flush() or discard(), or save all of it by ga::save");
  TORCH_CHECK(!shards(),
              "GradAccumulator: torch::save would save only this rank's shard of the wrapped optimizer's state; save "
              "by ga::save on all ranks");
}

GRADACCUM_INLINE void Accumulator::check_can_clip() const {
  TORCH_CHECK(!window_->steps_in_backward(),
              "GradAccumulator: clipping needs all gradients at once, but in_backward steps with each as it arrives; "
              "use only one of the two");
}

GRADACCUM_INLINE void Accumulator::refresh_parameters() {
  synchronize();
  window_->refresh_parameters();
}

GRADACCUM_INLINE void Accumulator::clip() {
  window_->or_spoil([this] {
    const auto gradients = window_->closing()->handle();
    grad_norm_ = clip_norm_ ? gradaccum::clip_grad_norm_(gradients, *clip_norm_) : at::Tensor();
    if (clip_value_) gradaccum::clip_grad_value_(gradients, *clip_value_);
  });
  clip_norm_.reset();
  clip_value_.reset();
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
