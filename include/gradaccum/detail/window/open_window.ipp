// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/open_window.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>

#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE OpenWindow::OpenWindow(std::int64_t steps, std::optional<at::ScalarType> accumulate_in)
    : window_(steps) {
  set_accumulate_in(accumulate_in);
}

GRADACCUM_INLINE OpenWindow::~OpenWindow() {
  if (state_) state_->close();
}

GRADACCUM_INLINE void OpenWindow::open(const std::vector<at::Tensor>& parameters) {
  auto next = std::make_shared<WindowGradients>(parameters);  // may throw: then nothing has changed
  close_watch_.follow(next->all_parameters());
  if (peers_) peers_->end_window();
  if (state_) {
    state_->close();
    next->take_norm_memory(*state_);
  }
  after_another_ = state_ != nullptr;
  state_ = std::move(next);
  listed_ = parameters;
  window_.restart();
  use_ = {};
  following_ = shared_ = reduced_ = false;
  state_->set_weights(0, 0);
  state_->set_complete(false);
  look();
  close_watch_.open();
}

GRADACCUM_INLINE void OpenWindow::follow(const std::vector<at::Tensor>& parameters) {
  if (same_parameters(parameters, listed_)) return;
  check_kept();
  const auto before = state_->all_parameters();
  state_->sums().set_parameters(parameters);
  watch_.follow(before, state_->all_parameters());
  close_watch_.follow(state_->all_parameters());
  listed_ = parameters;
}

GRADACCUM_INLINE void OpenWindow::cleared(const std::vector<at::Tensor>& parameters) {
  if (use_.in_hand() || use_.spoiled() || state_->applied())
    open(parameters);
  else
    look();
  after_another_ = false;
}

GRADACCUM_INLINE void OpenWindow::backward(Loss loss, const BackwardOptions& options, bool fills) {
  check_usable();
  TORCH_CHECK(!following_,
              "GradAccumulator: backward() after others_continue() has said that others close a window with this "
              "process; call step() first");
  use_.check_form(Form::weighted);
  use_.check_none_in_hand();
  TORCH_CHECK(!state_->applied(), "GradAccumulator: backward() after gradients().apply(); call step() first");
  loss.output.reset();  // backward does not need it: a language model's logits are large
  loss.target.reset();
  loss.check();
  check_weight(loss, window_.first_weight());
  if (steps_in_backward())
    check_can_step_in_backward(finite_required(loss.seed) || state_->must_be_finite(), options.create_graph);
  check_kept();
  check_cleared();
  check_only_ours();
  window_.add(loss.items);
  use_.begin(Form::weighted);
  if (loss.items == 0) return;
  use_.take_seed(loss.seed);
  if (loss.items != window_.first_weight()) {
    loss.seed.multiply(loss.items);
    loss.seed.divide(window_.first_weight());
  }
  const auto run = [&] { loss.backward(options); };
  or_spoil([&] {
    const bool sends = peers_ && (fills || peers_->take_each_backward());
    if (!sends && !(fills && steps_in_backward())) return run();
    state_->set_weights(window_.first_weight(), window_.total_weight());
    shared_ = peers_ && fills;
    if (sends) return peers_->backward(state_, accumulate_in_, run);
    step_in_backward(state_, accumulate_in_, step_in_backward_, run);
  });
  look();
}

GRADACCUM_INLINE void OpenWindow::check_not_to_be_cleared() const {
  if (use_.spoiled() || use_.in_hand() || !touched()) return;
  TORCH_CHECK(false,
              "GradAccumulator: zero_grad() in the middle of a window, and since the last step() somebody has added to "
              "its gradients: a backward for other parameters that came along here, as of a GAN's generator, or one "
              "without a step(). Say whose gradients it is for: loss.backward({}, {}, false, generator->parameters()), "
              "or optimizer.backward(loss, {.inputs = generator->parameters()})");
}

GRADACCUM_INLINE void OpenWindow::keep_sums_apart() {
  if (std::exchange(sums_apart_, true) || window_.count() == 0 || state_->applied()) return;
  check_kept();
  state_->sums().move_apart();
  look();
}

GRADACCUM_INLINE void OpenWindow::complete_micro_batch() {
  check_usable();
  check_kept();
  if (following_) return settle(/*complete=*/true);
  if (full()) use_.check_scaler(state_->must_be_finite());
  use_.in_hand() ? check_not_rewritten() : count_plain();
  if (watches_closely()) close_watch_.watch_parameters();
  if (use_.weighted() && !state_->applied()) check_only_ours();
  settle(full());
  end_micro_batch();
}

GRADACCUM_INLINE bool OpenWindow::complete_early() {
  check_usable();
  if (window_.count() == 0 && !following_) return false;
  check_kept();
  TORCH_CHECK(
      use_.in_hand() || !touched(),
      "GradAccumulator: the gradients changed after the last step(); call step() for the last micro-batch, too, "
      "before flush()");
  use_.check_scaler(state_->must_be_finite());
  if (window_.count() > 1) check_not_rewritten();
  settle(/*complete=*/true);
  end_micro_batch();
  return true;
}

/// A `loss.backward()` of the user's own shows in the gradients.
GRADACCUM_INLINE const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  check_usable();
  check_kept();
  if (!use_.in_hand() && !use_.weighted() && touched()) count_plain();
  if (use_.in_hand() || following_) settle(full());
  return state_;
}

GRADACCUM_INLINE void OpenWindow::state(Archive& archive, const NameOf& name_of) {
  if (!archive.loading()) {
    check_usable();
    check_kept();
    TORCH_CHECK(!use_.in_hand() && (window_.count() == 0 || !touched()),
                "GradAccumulator: state() in the middle of a micro-batch; call step() first");
    TORCH_CHECK(!state_->elsewhere(),
                "GradAccumulator: with Shard::gradients a window is saved when it is closed, and there are ",
                window_.count(), " micro-batches in it; save after a step() that returned true, or after flush()");
  }
  auto count = window_.count();
  auto first = window_.first_weight(), total = window_.total_weight();
  archive("micro_batches", count);
  archive("first_weight", first);
  archive("total_weight", total);
  auto use = archive.loading() ? WindowUse() : use_;
  use.state(archive, count);
  auto sums = count > 0 ? state_->sums().named(name_of) : WindowSums::Named();
  archive.tensors(sums);
  if (!archive.loading()) return;
  Window next = window_;
  next.resume(count, first, total);
  auto loaded = state_->sums().take(std::move(sums), name_of, archive.changes_allowed());
  archive.when_all_fit([=, this] { resume(next, use, loaded); });
}

GRADACCUM_INLINE void OpenWindow::resume(const Window& window, const WindowUse& use, const WindowSums::Loaded& sums) {
  open(listed_);
  after_another_ = false;
  state_->sums().set(sums);
  if (sums_apart_) state_->sums().move_apart();
  window_ = window;
  use_ = use;
  state_->set_weights(window.first_weight(), window.total_weight());
  look();
}

/// The copy stays one.
GRADACCUM_INLINE void OpenWindow::go_back(const Copy& copy) {
  open(listed_);
  state_->sums().set(copy.sums);
  resume(copy.window, copy.use, state_->sums().copies());
}

GRADACCUM_INLINE bool OpenWindow::has_weight() const { return state_->items() > 0; }

GRADACCUM_INLINE std::int64_t OpenWindow::bytes() const {
  std::size_t all = 0;
  for (const auto place : state_->sums().places()) {
    const auto& sum = state_->sums()[place];
    all += sum.is_sparse() ? sum._indices().nbytes() + sum._values().nbytes() : sum.nbytes();
  }
  return static_cast<std::int64_t>(all);
}

GRADACCUM_INLINE void OpenWindow::set_accumulate_in(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(!dtype || at::isFloatingType(*dtype), "GradAccumulator: accumulate_in must be a floating dtype, got ",
              *dtype);
  accumulate_in_ = dtype;
}

GRADACCUM_INLINE void OpenWindow::set_step_in_backward(StepOfSome step) {
  TORCH_CHECK(window_.count() == 0, "GradAccumulator: in_backward must be set between windows, got it inside of one");
  check_goes_with_peers(peers_ != nullptr, step != nullptr);
  step_in_backward_ = std::move(step);
}

GRADACCUM_INLINE void OpenWindow::set_peers(std::shared_ptr<Peers> peers) {
  TORCH_CHECK(window_.count() == 0, "GradAccumulator: must join other processes between windows, got it inside of one");
  check_goes_with_peers(peers != nullptr, steps_in_backward());
  peers_ = std::move(peers);
}

GRADACCUM_INLINE bool OpenWindow::others_continue() {
  check_usable();
  if (!peers_) return false;
  following_ = peers_->others_continue(state_, accumulate_in_);
  if (peers_->shards()) look();  // others may have asked for its gradients
  return following_;
}

GRADACCUM_INLINE void OpenWindow::or_spoil(c10::function_ref<void()> work) {
  try {
    work();
  } catch (...) {
    use_.spoil();
    throw;
  }
}

GRADACCUM_INLINE void OpenWindow::check_usable() const { use_.check_usable(state_->stepped()); }
GRADACCUM_INLINE void OpenWindow::check_kept() const {
  if (window_.count() > 0) watch_.check_kept(state_->all_parameters());
}
/// What other processes add arrives at any time.
GRADACCUM_INLINE void OpenWindow::check_only_ours() const {
  if (!shared_) watch_.check_only_ours(state_->all_parameters(), window_.count() == 0);
}
GRADACCUM_INLINE void OpenWindow::check_cleared() const {
  if (after_another_ && window_.count() == 0) watch_.check_cleared(state_->all_parameters());
}

/// A window of one is what it would be without an accumulator, whatever was written.
GRADACCUM_INLINE bool OpenWindow::watches_closely() const {
  return window_.steps() > 1 && !state_->applied() && !state_->stepped() && !shared_;
}

/// Gradients that no backward has made are the user's.
GRADACCUM_INLINE void OpenWindow::check_not_rewritten() const {
  if (watches_closely()) close_watch_.check_gradients(/*of_backward_alone=*/!use_.weighted());
}

GRADACCUM_INLINE void OpenWindow::end_micro_batch() {
  use_.end();
  close_watch_.count();
}

GRADACCUM_INLINE bool OpenWindow::touched() const { return !shared_ && watch_.touched(state_->all_parameters()); }
GRADACCUM_INLINE void OpenWindow::look() {
  watch_.look(state_->all_parameters());
  if (!shared_) close_watch_.look();
}

GRADACCUM_INLINE void OpenWindow::count_plain() {
  TORCH_CHECK(!steps_in_backward(),
              "GradAccumulator: with in_backward the parameters are stepped inside of backward; call "
              "optimizer.backward(loss) before each step(), in place of loss.backward()");
  use_.check_form(Form::plain);
  check_not_rewritten();
  if (after_another_ && window_.count() == 0 && window_.steps() > 1) close_watch_.check_cleared();
  close_watch_.warn_of_passes(window_.steps());
  window_.add(1.0);
  use_.begin(Form::plain);
}

GRADACCUM_INLINE void OpenWindow::settle(bool complete) {
  if (reduced_) return;
  const bool apart = accumulate_in_ || sums_apart_;
  if (apart) or_spoil([&] { state_->fold_into_sums(accumulate_in_); });
  if (sums_apart_ && !complete && !state_->applied()) state_->sums().move_apart();
  const bool seen = use_.weighted() && !apart && !state_->applied();  // by backward, and checked since
  if (!seen) look();
  state_->set_weights(window_.first_weight(), window_.total_weight());
  if (complete && peers_) reduce();
  state_->set_complete(complete);
}

GRADACCUM_INLINE void OpenWindow::reduce() {
  shared_ = true;
  or_spoil([&] { peers_->reduce(state_, accumulate_in_); });
  reduced_ = true;
  look();
}

}  // namespace gradaccum::detail
