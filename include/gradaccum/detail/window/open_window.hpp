// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/gradient_watch.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/detail/window/step_in_backward.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/detail/window/window_use.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The window that an accumulator has open: counts its micro-batches, keeps their sums, and notices misuse.
/// Knows no optimizer, and so is compiled once.
class OpenWindow {
 public:
  OpenWindow(std::int64_t steps, std::optional<at::ScalarType> accumulate_in) : window_(steps) {
    set_accumulate_in(accumulate_in);
  }
  OpenWindow(const OpenWindow&) = delete;
  OpenWindow& operator=(const OpenWindow&) = delete;
  ~OpenWindow() {
    if (state_) state_->close();
  }

  /// The old window is over, a new one begins.
  void open(const std::vector<at::Tensor>& parameters);
  /// Parameters may be added to the optimizer at any time.
  void follow(const std::vector<at::Tensor>& parameters);
  /// The gradients have been cleared before the first micro-batch was complete: what was in hand is gone.
  void cleared(const std::vector<at::Tensor>& parameters);

  /// `fills`: the window is complete with this micro-batch, and in backward is when it may be stepped.
  void backward(Loss loss, std::optional<bool> retain_graph, bool create_graph, bool fills = false);
  /// Counts the micro-batch in hand, if it has not been counted, and completes it.
  void complete_micro_batch();
  /// Makes the window as it is a complete one; false if there is no micro-batch in it.
  bool complete_early();
  /// The window so far, the micro-batch in hand included.
  const std::shared_ptr<WindowGradients>& so_far();
  /// The window that is being closed.
  const std::shared_ptr<WindowGradients>& closing() const { return state_; }

  /// Between two micro-batches: saves the window, or goes on with one that was saved.
  void state(Archive& archive, const NameOf& name_of);

  std::int64_t micro_steps() const { return window_.count() - use_.in_hand(); }
  bool ready() const { return micro_steps() + 1 >= window_.steps(); }
  bool follows_others() const { return following_; }
  bool full() const { return following_ || window_.full(); }
  /// Of the other processes, too, once it is complete.
  bool has_weight() const { return state_->items() > 0; }
  std::int64_t steps() const { return window_.steps(); }
  void set_steps(std::int64_t steps) { window_.set_steps(steps); }
  void set_accumulate_in(std::optional<at::ScalarType> dtype) {
    TORCH_CHECK(!dtype || at::isFloatingType(*dtype), "GradAccumulator: accumulate_in must be a floating dtype, got ",
                *dtype);
    accumulate_in_ = dtype;
  }
  /// The backward that fills the window steps each parameter by this, as its gradient arrives; none: nothing is
  /// stepped before the window closes.
  void set_step_in_backward(StepOfSome step) {
    TORCH_CHECK(window_.count() == 0, "GradAccumulator: in_backward must be set between windows, got it inside of one");
    check_goes_with_peers(peers_ != nullptr, step != nullptr);
    step_in_backward_ = std::move(step);
  }
  bool steps_in_backward() const { return step_in_backward_ != nullptr; }

  /// Each window becomes that of all these processes when it is complete.
  void set_peers(std::shared_ptr<Peers> peers) {
    TORCH_CHECK(window_.count() == 0,
                "GradAccumulator: must join other processes between windows, got it inside of one");
    check_goes_with_peers(peers != nullptr, steps_in_backward());
    peers_ = std::move(peers);
  }
  const std::shared_ptr<Peers>& peers() const { return peers_; }
  /// There are no more micro-batches here, and others have some: this window is complete with theirs, empty or not.
  bool others_continue() {
    check_usable();
    if (peers_) following_ = peers_->others_continue(state_);
    return following_;
  }

  /// Runs `work`; an exception in it leaves gradients incomplete, and the window must not be stepped with.
  template <class Work>
  void or_spoil(const Work& work) {
    try {
      work();
    } catch (...) {
      use_.spoil();
      throw;
    }
  }

 private:
  using Form = WindowUse::Form;

  void check_usable() const { use_.check_usable(state_->stepped()); }
  void check_kept() const {
    if (window_.count() > 0) watch_.check_kept(state_->all_parameters());
  }
  void check_only_ours() const { watch_.check_only_ours(state_->all_parameters(), window_.count() == 0); }
  bool touched() const { return watch_.touched(state_->all_parameters()); }
  void count_plain();
  void settle(bool complete);
  void reduce();

  Window window_;
  std::optional<at::ScalarType> accumulate_in_;
  StepOfSome step_in_backward_;
  std::shared_ptr<Peers> peers_;
  std::vector<at::Tensor> listed_;  // the parameters as the optimizer lists them
  std::shared_ptr<WindowGradients> state_;
  GradientWatch watch_;
  WindowUse use_;
  bool following_ = false;  // complete, for the others' sake
  bool reduced_ = false;    // it is the window of all processes now
};

inline void OpenWindow::open(const std::vector<at::Tensor>& parameters) {
  auto next = std::make_shared<WindowGradients>(parameters);  // may throw: then nothing has changed
  if (peers_) peers_->end_window();
  if (state_) state_->close();
  state_ = std::move(next);
  listed_ = parameters;
  window_.restart();
  use_ = {};
  following_ = reduced_ = false;
  state_->set_weights(0, 0);
  state_->set_complete(false);
  watch_.look(state_->all_parameters());
}

inline void OpenWindow::follow(const std::vector<at::Tensor>& parameters) {
  auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (std::equal(parameters.begin(), parameters.end(), listed_.begin(), listed_.end(), same)) return;
  check_kept();
  const auto before = state_->all_parameters();
  state_->sums().set_parameters(parameters);
  watch_.follow(before, state_->all_parameters());
  listed_ = parameters;
}

inline void OpenWindow::cleared(const std::vector<at::Tensor>& parameters) {
  if (use_.in_hand() || use_.spoiled() || state_->applied()) return open(parameters);
  watch_.look(state_->all_parameters());
}

inline void OpenWindow::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph, bool fills) {
  check_usable();
  use_.check_form(Form::weighted);
  use_.check_none_in_hand();
  TORCH_CHECK(!state_->applied(), "GradAccumulator: backward() after gradients().apply(); call step() first");
  loss.output.reset();  // backward does not need it: a language model's logits are large
  loss.target.reset();
  loss.check();
  check_weight(loss, window_.first_weight());
  if (steps_in_backward())
    check_can_step_in_backward(finite_required(loss.seed) || state_->must_be_finite(), create_graph);
  check_kept();
  check_only_ours();
  window_.add(loss.items);
  use_.begin(Form::weighted);
  if (loss.items == 0) return;
  use_.take_seed(loss.seed);
  if (loss.items != window_.first_weight()) {
    loss.seed.multiply(loss.items);
    loss.seed.divide(window_.first_weight());
  }
  const auto run = [&] { loss.backward(retain_graph, create_graph); };
  or_spoil([&] {
    if (!fills || !(steps_in_backward() || peers_)) return run();
    state_->set_weights(window_.first_weight(), window_.total_weight());
    if (peers_) return peers_->backward(state_, accumulate_in_, run);
    step_in_backward(state_, accumulate_in_, step_in_backward_, run);
  });
  watch_.look(state_->all_parameters());
}

inline void OpenWindow::count_plain() {
  TORCH_CHECK(!steps_in_backward(),
              "GradAccumulator: with in_backward the parameters are stepped inside of backward; call "
              "optimizer.backward(loss) before each step(), in place of loss.backward()");
  use_.check_form(Form::plain);
  window_.add(1.0);
  use_.begin(Form::plain);
}

inline void OpenWindow::complete_micro_batch() {
  check_usable();
  check_kept();
  if (following_) return settle(/*complete=*/true);
  if (full()) use_.check_scaler(state_->must_be_finite());
  if (!use_.in_hand()) count_plain();
  if (use_.weighted() && !state_->applied()) check_only_ours();
  settle(full());
  use_.end();
}

inline bool OpenWindow::complete_early() {
  check_usable();
  if (window_.count() == 0 && !following_) return false;
  check_kept();
  TORCH_CHECK(
      use_.in_hand() || !touched(),
      "GradAccumulator: the gradients changed after the last step(); call step() for the last micro-batch, too, "
      "before flush()");
  use_.check_scaler(state_->must_be_finite());
  settle(/*complete=*/true);
  use_.end();
  return true;
}

/// A `loss.backward()` of the user's own shows in the gradients.
inline const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  check_usable();
  check_kept();
  if (!use_.in_hand() && !use_.weighted() && touched()) count_plain();
  if (use_.in_hand() || following_) settle(full());
  return state_;
}

inline void OpenWindow::state(Archive& archive, const NameOf& name_of) {
  if (!archive.loading()) {
    check_usable();
    check_kept();
    TORCH_CHECK(!use_.in_hand() && (window_.count() == 0 || !touched()),
                "GradAccumulator: state() in the middle of a micro-batch; call step() first");
  }
  auto count = window_.count();
  auto first = window_.first_weight(), total = window_.total_weight();
  archive("micro_batches", count);
  archive("first_weight", first);
  archive("total_weight", total);
  auto use = archive.loading() ? WindowUse() : use_;
  use.state(archive, count);
  auto sums = count > 0 ? state_->sums().named(name_of) : SumsByName();
  archive.tensors(sums.tensors());
  if (!archive.loading()) return;
  Window next = window_;
  next.resume(count, first, total);
  auto loaded = state_->sums().take(std::move(sums), name_of, archive.changes_allowed());
  archive.when_all_fit([=, this] {
    open(listed_);
    state_->sums().set(loaded);
    window_ = next;
    use_ = use;
    state_->set_weights(first, total);
    watch_.look(state_->all_parameters());
  });
}

/// Takes notice of the gradients as they are.
inline void OpenWindow::settle(bool complete) {
  if (reduced_) return;
  if (accumulate_in_) or_spoil([&] { state_->fold_into_sums(*accumulate_in_); });
  const bool seen = use_.weighted() && !accumulate_in_ && !state_->applied();  // by backward, and checked since
  if (!seen) watch_.look(state_->all_parameters());
  state_->set_weights(window_.first_weight(), window_.total_weight());
  if (complete && peers_) reduce();
  state_->set_complete(complete);
}

inline void OpenWindow::reduce() {
  or_spoil([&] { peers_->reduce(state_, accumulate_in_); });
  reduced_ = true;
  watch_.look(state_->all_parameters());
}

}  // namespace gradaccum::detail
