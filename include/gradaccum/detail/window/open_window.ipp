// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/open_window.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/peers.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE OpenWindow::OpenWindow(std::unique_ptr<AnyOptimizer> optimizer, std::int64_t steps,
                                        std::optional<at::ScalarType> accumulate_in)
    : optimizer_(std::move(optimizer)), now_{.counter = Window(steps)} {
  set_accumulate_in(accumulate_in);
  open(optimizer_->parameters());
}

GRADACCUM_INLINE OpenWindow::OpenWindow(std::unique_ptr<AnyOptimizer> optimizer)
    : OpenWindow(std::move(optimizer), std::numeric_limits<std::int64_t>::max(), {}) {}

GRADACCUM_INLINE OpenWindow::~OpenWindow() {
  if (now_.gradients) now_.gradients->close();
}

GRADACCUM_INLINE void OpenWindow::open(const std::vector<at::Tensor>& parameters) {
  auto next = std::make_shared<WindowGradients>(parameters);  // may throw: then nothing has changed
  misuse_.before_open(next->all_parameters());
  if (peers_) peers_->end_window();
  const bool after_another = now_.gradients != nullptr;
  if (after_another) {
    now_.gradients->close();
    next->take_norm_memory(*now_.gradients);
  }
  listed_ = parameters;
  now_.counter.restart();
  now_ = {.counter = now_.counter,
          .gradients = std::move(next),
          .has_peers = peers_ != nullptr,
          .steps_in_backward = step_in_backward_ != nullptr};
  now_.gradients->set_weights(0, 0);
  now_.gradients->set_complete(false);
  misuse_.opened(after_another);
}

GRADACCUM_INLINE void OpenWindow::follow() {
  const auto parameters = optimizer_->parameters();
  if (same_parameters(parameters, listed_)) return;
  misuse_.check_kept();
  const auto before = now_.gradients->all_parameters();
  now_.gradients->sums().set_parameters(parameters);
  misuse_.follow(before, now_.gradients->all_parameters());
  listed_ = parameters;
}

GRADACCUM_INLINE void OpenWindow::backward(Loss loss, const BackwardOptions& options, bool fills) {
  misuse_.at_backward(loss, options);
  loss.output.reset();  // backward does not need it: a language model's logits are large
  loss.target.reset();
  now_.counter.add(loss.items);
  now_.form = WindowForm::weighted, now_.in_hand = true;
  if (loss.items == 0) return;
  now_.scaled = now_.scaled || finite_required(loss.seed);
  if (loss.items != now_.counter.first_weight()) {
    loss.seed.multiply(loss.items);
    loss.seed.divide(now_.counter.first_weight());
  }
  or_spoil([&] { run_backward(loss, options, fills); });
  misuse_.look();
}

GRADACCUM_INLINE void OpenWindow::run_backward(const Loss& loss, const BackwardOptions& options, bool fills) {
  const auto run = [&] { loss.backward(options); };
  const bool sends = peers_ && (fills || peers_->take_each_backward());
  if (!sends && !(fills && steps_in_backward())) return run();
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  if (peers_ && fills) now_.gradients->set_sending();
  if (sends) return peers_->backward(now_.gradients, accumulate_in_, run);
  step_in_backward(now_.gradients, accumulate_in_, step_in_backward_, run);
}

GRADACCUM_INLINE void OpenWindow::complete_micro_batch() {
  misuse_.at_step();
  if (now_.following) return settle(/*complete=*/true);
  if (!now_.in_hand) count_plain();
  misuse_.after_count();
  settle(now_.full());
  end_micro_batch();
}

GRADACCUM_INLINE void OpenWindow::add(Loss loss, bool fills) {
  follow();
  backward(std::move(loss), {}, fills);
  complete_micro_batch();
}

GRADACCUM_INLINE bool OpenWindow::complete_early() {
  misuse_.check_usable();
  if (now_.count() == 0 && !now_.following) return false;
  misuse_.at_flush();
  settle(/*complete=*/true);
  end_micro_batch();
  return true;
}

GRADACCUM_INLINE StepResult OpenWindow::close() {
  StepResult result = StepResult::empty;
  try {
    const auto& left = now_.gradients->stepped() ? now_.gradients->rest() : now_.gradients;
    if (has_weight()) result = peers_ ? peers_->step(*optimizer_, left) : take_step(*optimizer_, Gradients(left));
  } catch (...) {
    now_.gradients->spoil();
    throw;
  }
  if (now_.gradients->stepped()) result = StepResult::stepped;  // in backward
  open(optimizer_->parameters());
  if (!result) clear();
  return result;
}

GRADACCUM_INLINE void OpenWindow::discard() {
  open(optimizer_->parameters());
  clear();
}

GRADACCUM_INLINE void OpenWindow::clear(bool set_to_none) {
  optimizer_->zero_grad(set_to_none);
  if (now_.in_hand || now_.gradients->spoiled() || now_.gradients->applied())
    open(optimizer_->parameters());
  else
    misuse_.look();
  misuse_.cleared();
}

GRADACCUM_INLINE void OpenWindow::clear_others() {
  const auto parameters = optimizer_->parameters();
  if (std::any_of(parameters.begin(), parameters.end(), [](auto& p) { return p.grad().defined(); })) clear();
}

GRADACCUM_INLINE void OpenWindow::keep_sums_apart() {
  if (std::exchange(sums_apart_, true) || now_.count() == 0 || now_.gradients->applied()) return;
  misuse_.check_kept();
  now_.gradients->sums().move_apart();
  misuse_.look();
}

/// Counts a `loss.backward()` of the user's own, which shows in the gradients.
GRADACCUM_INLINE const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  misuse_.check_usable();
  misuse_.check_kept();
  if (!now_.in_hand && !now_.weighted() && misuse_.touched()) count_plain();
  if (now_.in_hand || now_.following) settle(now_.full());
  return now_.gradients;
}

/// Restores copies of the sums, so that `copy` can be used again.
GRADACCUM_INLINE void OpenWindow::go_back(const Copy& copy) {
  open(listed_);
  now_.gradients->sums().set(copy.sums);
  resume({copy.window, copy.form, copy.scaled, now_.gradients->sums().copies()});
}

GRADACCUM_INLINE void OpenWindow::state(Archive& archive, const NameOf& name_of) {
  follow();
  if (!archive.loading()) misuse_.at_save();
  auto count = now_.count();
  auto first = now_.counter.first_weight(), total = now_.counter.total_weight();
  archive("micro_batches", count);
  archive("first_weight", first);
  archive("total_weight", total);
  bool weighted = now_.weighted(), scaled = now_.scaled;
  archive("weighted", weighted);
  archive("scaled", scaled);
  auto sums = count > 0 ? now_.gradients->sums().named(name_of) : WindowSums::Named();
  archive.tensors(sums);
  if (!archive.loading()) return;
  Window next = now_.counter;
  next.resume(count, first, total);
  const auto form = count == 0 ? WindowForm::none : weighted ? WindowForm::weighted : WindowForm::plain;
  auto loaded = now_.gradients->sums().take(std::move(sums), name_of, archive.changes_allowed());
  archive.when_all_fit([=, this] { resume({next, form, scaled, loaded}); });
}

GRADACCUM_INLINE void OpenWindow::resume(const Copy& window) {
  open(listed_);
  misuse_.cleared();
  now_.gradients->sums().set(window.sums);
  if (sums_apart_) now_.gradients->sums().move_apart();
  now_.counter = window.window;
  now_.form = window.form, now_.scaled = window.scaled;
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  misuse_.look();
}

GRADACCUM_INLINE std::int64_t OpenWindow::bytes() const {
  std::size_t all = 0;
  for (const auto place : now_.gradients->sums().places()) {
    const auto& sum = now_.gradients->sums()[place];
    all += sum.is_sparse() ? sum._indices().nbytes() + sum._values().nbytes() : sum.nbytes();
  }
  return static_cast<std::int64_t>(all);
}

GRADACCUM_INLINE void OpenWindow::set_accumulate_in(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(!dtype || at::isFloatingType(*dtype), "GradAccumulator: accumulate_in must be a floating dtype, got ",
              *dtype);
  accumulate_in_ = dtype;
}

GRADACCUM_INLINE void OpenWindow::set_in_backward(bool on) {
  TORCH_CHECK(!on || optimizer_->takes_gradients(),
              "GradAccumulator: in_backward needs an optimizer that takes gradients: ga::optim::SGD, Adam, AdamW, or "
              "one of your own that derives from ga::TakesGradients; got ",
              optimizer_->name());
  TORCH_CHECK(now_.count() == 0, "GradAccumulator: in_backward must be set between windows, got it inside of one");
  check_goes_with_peers(peers_ != nullptr, on);
  now_.steps_in_backward = on;
  step_in_backward_ = nullptr;
  if (on) step_in_backward_ = [this](Gradients some) { return take_step(*optimizer_, std::move(some)); };
}

GRADACCUM_INLINE void OpenWindow::set_peers(std::shared_ptr<Peers> peers) {
  if (peers) peers->join(*optimizer_);
  TORCH_CHECK(now_.count() == 0, "GradAccumulator: must join other processes between windows, got it inside of one");
  check_goes_with_peers(peers != nullptr, steps_in_backward());
  peers_ = std::move(peers);
  now_.has_peers = peers_ != nullptr;
}

GRADACCUM_INLINE bool OpenWindow::others_continue() {
  follow();
  if (!has_weight()) clear_others();
  misuse_.check_usable();
  if (!peers_) return false;
  now_.following = peers_->others_continue(now_.gradients, accumulate_in_);
  if (peers_->shards()) misuse_.look();  // others may have asked for its gradients
  return now_.following;
}

GRADACCUM_INLINE void OpenWindow::or_spoil(c10::function_ref<void()> work) {
  try {
    work();
  } catch (...) {
    now_.gradients->spoil();
    throw;
  }
}

GRADACCUM_INLINE void OpenWindow::count_plain() {
  misuse_.at_plain_backward();
  now_.counter.add(1.0);
  now_.form = WindowForm::plain, now_.in_hand = true;
}

GRADACCUM_INLINE void OpenWindow::end_micro_batch() {
  now_.in_hand = false;
  misuse_.end_micro_batch();
}

GRADACCUM_INLINE void OpenWindow::settle(bool complete) {
  if (now_.reduced()) return;
  const bool apart = accumulate_in_ || sums_apart_;
  if (apart) or_spoil([&] { now_.gradients->fold_into_sums(accumulate_in_); });
  if (sums_apart_ && !complete && !now_.gradients->applied()) now_.gradients->sums().move_apart();
  const bool seen = now_.weighted() && !apart && !now_.gradients->applied();  // by backward, and checked since
  if (!seen) misuse_.look();
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  if (complete && peers_) {
    now_.gradients->set_sending();
    or_spoil([&] { peers_->reduce(now_.gradients, accumulate_in_); });
  }
  now_.gradients->set_complete(complete);
  if (now_.reduced()) misuse_.look();
}

}  // namespace gradaccum::detail
