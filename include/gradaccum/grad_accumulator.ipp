// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/grad_accumulator.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/detail/window/peers.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE Accumulator::Accumulator(std::unique_ptr<detail::AnyOptimizer> optimizer,
                                          const GradAccumulatorOptions& options)
    : window_(std::make_unique<detail::OpenWindow>(std::move(optimizer), options.steps, options.accumulate_in)) {
  window_->set_in_backward(options.in_backward);
}

GRADACCUM_INLINE Accumulator::~Accumulator() = default;

GRADACCUM_INLINE std::unique_ptr<detail::OpenWindow> Accumulator::given_away() {
  TORCH_CHECK(micro_steps() == 0 && !window_->in_hand(),
              "GradAccumulator: can be moved between windows, got it inside of one; call flush() or discard() first");
  TORCH_CHECK(!facade_,
              "GradAccumulator: cannot be moved any more: somebody has a reference to it as a torch::optim::Optimizer, "
              "a scheduler say");
  return std::move(window_);
}

GRADACCUM_INLINE Accumulator::Accumulator(Accumulator&& other)
    : window_(other.given_away()),
      updates_(other.updates_),
      clip_norm_(other.clip_norm_),
      clip_value_(other.clip_value_),
      grad_norm_(std::move(other.grad_norm_)) {}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph) {
  backward(std::move(loss), BackwardOptions{.retain_graph = retain_graph, .create_graph = create_graph});
}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, const BackwardOptions& options) {
  follow();
  window_->backward(std::move(loss), options, ready());
}

GRADACCUM_INLINE StepResult Accumulator::step() {
  follow();
  window_->complete_micro_batch();
  if (!window_->full()) return StepResult::accumulated;
  clip();
  return counted(window_->close());
}

GRADACCUM_INLINE at::Tensor Accumulator::step(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  step();
  return loss;
}

GRADACCUM_INLINE void Accumulator::zero_grad(bool set_to_none) {
  if (micro_steps() == 0)
    window_->clear(set_to_none);
  else
    window_->check_not_to_be_cleared();
}

GRADACCUM_INLINE StepResult Accumulator::flush() {
  follow();
  if (!window_->complete_early()) return StepResult::empty;
  clip();
  const auto result = counted(window_->close());
  window_->clear();
  return result;
}

GRADACCUM_INLINE void Accumulator::discard() {
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
              "GradAccumulator: grad_norm() needs a closed window for which "
              "clip_grad_norm_(max) was called; infinity only measures");
  return grad_norm_;
}

GRADACCUM_INLINE Gradients Accumulator::gradients() {
  follow();
  return Gradients(window_->so_far());
}

GRADACCUM_INLINE Accumulator::NamedWindow Accumulator::named_window(const torch::nn::Module& module) {
  follow();
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
GRADACCUM_INLINE void Accumulator::set_peers(std::shared_ptr<detail::Peers> peers) {
  window_->set_peers(std::move(peers));
}

GRADACCUM_INLINE std::shared_ptr<detail::Shards> Accumulator::shards() const {
  return window_->peers() ? window_->peers()->shards() : nullptr;
}

GRADACCUM_INLINE bool Accumulator::others_continue() {
  follow();
  return window_->others_continue();
}

GRADACCUM_INLINE std::string Accumulator::description() const {
  return "Wrapping '" + window_->optimizer().name() + "' optimizer with gradient accumulation of " +
         std::to_string(window_->steps()) + (window_->steps() == 1 ? " step" : " steps");
}

GRADACCUM_INLINE void Accumulator::synchronise() const {
  if (facade_) facade_->synchronise();
}

GRADACCUM_INLINE torch::optim::Optimizer& Accumulator::facade_of(torch::optim::Optimizer& wrapped) {
  const auto step_and_clear = [this] {
    window_->keep_sums_apart();
    step();
    zero_grad();
  };
  if (!facade_)
    facade_ = std::make_unique<detail::OptimizerFacade>(wrapped, step_and_clear, [this] { check_can_be_saved(); });
  if (micro_steps() > 0) window_->keep_sums_apart();
  facade_->synchronise();
  return *facade_;
}

GRADACCUM_INLINE void Accumulator::check_can_be_saved() const {
  TORCH_CHECK(micro_steps() == 0,
              "GradAccumulator: torch::save keeps the wrapped optimizer's state alone, and there are ", micro_steps(),
              " micro-batches in the window; save after flush() or discard(), or all of it by ga::save");
  TORCH_CHECK(!shards(),
              "GradAccumulator: torch::save would keep this process's part of the wrapped optimizer's state "
              "alone; save by ga::save on all ranks");
}

GRADACCUM_INLINE void Accumulator::check_can_clip() const {
  TORCH_CHECK(!window_->steps_in_backward(),
              "GradAccumulator: clipping needs all gradients at once, and in_backward steps with each as it arrives; "
              "leave one of the two out");
}

GRADACCUM_INLINE void Accumulator::follow() {
  synchronise();
  window_->follow();
}

GRADACCUM_INLINE void Accumulator::clip() {
  window_->or_spoil([this] {
    const Gradients gradients(window_->closing());
    grad_norm_ = clip_norm_ ? gradaccum::clip_grad_norm_(gradients, *clip_norm_) : at::Tensor();
    if (clip_value_) gradaccum::clip_grad_value_(gradients, *clip_value_);
  });
  clip_norm_.reset();
  clip_value_.reset();
}

GRADACCUM_INLINE StepResult Accumulator::counted(StepResult result) {
  updates_ += result;
  return result;
}

GRADACCUM_INLINE void detail::check_can_be_accumulated(const torch::optim::Optimizer& optimizer) {
  check_can_be_wrapped(optimizer, "GradAccumulator", "set_steps(n) changes its window");
}

}  // namespace gradaccum
