// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/optimizer_window.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE OptimizerWindow::OptimizerWindow(std::unique_ptr<AnyOptimizer> optimizer, std::int64_t steps,
                                                  std::optional<at::ScalarType> accumulate_in)
    : OpenWindow(steps, accumulate_in), optimizer_(std::move(optimizer)) {
  open();
}

GRADACCUM_INLINE OptimizerWindow::OptimizerWindow(std::unique_ptr<AnyOptimizer> optimizer)
    : OptimizerWindow(std::move(optimizer), std::numeric_limits<std::int64_t>::max(), {}) {}

GRADACCUM_INLINE void OptimizerWindow::set_in_backward(bool on) {
  if (!on) return set_step_in_backward({});
  TORCH_CHECK(optimizer_->takes_gradients(),
              "GradAccumulator: in_backward needs an optimizer that takes gradients: ga::optim::SGD, Adam, AdamW, or "
              "one of your own that derives from ga::TakesGradients; got ",
              optimizer_->name());
  set_step_in_backward([this](Gradients some) { return take_step(*optimizer_, std::move(some)); });
}

GRADACCUM_INLINE void OptimizerWindow::set_peers(std::shared_ptr<Peers> peers) {
  if (peers) peers->join(*optimizer_);
  OpenWindow::set_peers(std::move(peers));
}

GRADACCUM_INLINE void OptimizerWindow::add(Loss loss, bool fills) {
  follow();
  backward(std::move(loss), {}, fills);
  complete_micro_batch();
}

GRADACCUM_INLINE void OptimizerWindow::clear(bool set_to_none) {
  optimizer_->zero_grad(set_to_none);
  cleared(optimizer_->parameters());
}

GRADACCUM_INLINE void OptimizerWindow::clear_others() {
  const auto parameters = optimizer_->parameters();
  if (std::any_of(parameters.begin(), parameters.end(), [](auto& p) { return p.grad().defined(); })) clear();
}

GRADACCUM_INLINE bool OptimizerWindow::others_continue() {
  follow();
  if (!has_weight()) clear_others();
  return OpenWindow::others_continue();
}

GRADACCUM_INLINE void OptimizerWindow::discard() {
  open();
  clear();
}

GRADACCUM_INLINE StepResult OptimizerWindow::close(const std::function<void(Gradients&)>& prepare) {
  StepResult result = StepResult::empty;
  or_spoil([&] {
    Gradients gradients(closing());
    prepare(gradients);
    if (has_weight()) result = step(gradients);
    if (closing()->stepped()) result = StepResult::stepped;  // in backward
  });
  open();
  if (!result) clear();
  return result;
}

GRADACCUM_INLINE StepResult OptimizerWindow::step(const Gradients& gradients) {
  if (peers()) return peers()->step(*optimizer_, closing());
  return take_step(*optimizer_, closing()->stepped() ? Gradients(closing()->rest()) : gradients);
}

GRADACCUM_INLINE void OptimizerWindow::Named::state(Archive& archive) {
  window.follow();
  window.OpenWindow::state(archive, name_of);
}

GRADACCUM_INLINE OptimizerWindow::Named OptimizerWindow::named(const torch::nn::Module& module) {
  return {*this, NameOf(module.named_parameters())};
}

}  // namespace gradaccum::detail
