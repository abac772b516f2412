// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/gradient_watch.hpp>
#include <gradaccum/detail/peers.hpp>
#include <gradaccum/detail/step_in_backward.hpp>
#include <gradaccum/detail/window_gradients.hpp>
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

  std::int64_t micro_steps() const { return window_.count() - in_hand_; }
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
      spoiled_ = true;
      throw;
    }
  }

 private:
  enum class Form { none, plain, weighted };

  void check_usable() const {
    TORCH_CHECK(!spoiled_ || !state_->stepped(), "GradAccumulator: ", stepped_in_part);
    TORCH_CHECK(!spoiled_, "GradAccumulator: an exception left this window's gradients incomplete; call discard()");
  }
  void check_form(Form form) const {
    TORCH_CHECK(form_ == Form::none || form_ == form,
                "GradAccumulator: one window mixes optimizer.backward(loss) with loss.backward() or with a step() that "
                "no backward precedes; use one form");
  }
  void check_kept() const {
    if (window_.count() > 0) watch_.check_kept(state_->all_parameters());
  }
  void check_only_ours() const { watch_.check_only_ours(state_->all_parameters(), window_.count() == 0); }
  bool touched() const { return watch_.touched(state_->all_parameters()); }
  static void check_goes_with_peers(bool peers, bool in_backward) {
    TORCH_CHECK(!peers || !in_backward,
                "GradAccumulator: in_backward frees each gradient as it arrives, before it could be summed over the "
                "other processes; leave one of the two out");
  }
  void check_weight(const Loss& loss) const;
  void check_scaler() const;
  void check_can_step_in_backward(const Loss& loss, bool create_graph) const;
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
  Form form_ = Form::none;
  bool in_hand_ = false;  // the last micro-batch is counted, but not complete
  bool spoiled_ = false;
  bool scaled_ = false;     // its losses were scaled by a loss scaler
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
  form_ = Form::none;
  in_hand_ = spoiled_ = scaled_ = following_ = reduced_ = false;
  state_->set_weights(0, 0);
  state_->set_complete(false);
  watch_.look(state_->all_parameters());
}

inline void OpenWindow::follow(const std::vector<at::Tensor>& parameters) {
  auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (std::equal(parameters.begin(), parameters.end(), listed_.begin(), listed_.end(), same)) return;
  check_kept();
  const auto before = state_->all_parameters();
  state_->set_parameters(parameters);
  watch_.follow(before, state_->all_parameters());
  listed_ = parameters;
}

inline void OpenWindow::cleared(const std::vector<at::Tensor>& parameters) {
  if (in_hand_ || spoiled_ || state_->applied()) return open(parameters);
  watch_.look(state_->all_parameters());
}

/// The seed of backward has the dtype of the loss, and must fit.
inline void OpenWindow::check_weight(const Loss& loss) const {
  Window::check_weight(loss.items);
  if (loss.items == 0 || window_.first_weight() == 0) return;
  const double ratio = loss.items / window_.first_weight();
  const double largest = loss.mean.scalar_type() == at::kHalf     ? 65504.0
                         : loss.mean.scalar_type() == at::kDouble ? 1e308
                                                                  : 3e38;
  TORCH_CHECK(ratio <= largest, "Loss: a weight must be at most ", largest, " times the window's first one (",
              window_.first_weight(), ") with a loss of dtype ", loss.mean.scalar_type(), ", got ", loss.items,
              "; compute the loss in a wider dtype");
}

/// The scaler that scaled the losses must have asked for the reverse.
inline void OpenWindow::check_scaler() const {
  TORCH_CHECK(!scaled_ || state_->must_be_finite(),
              "GradAccumulator: the losses of this window are scaled, and its gradients are not to be divided by the "
              "scale; call scaler.step(optimizer) in place of optimizer.step()");
}

/// Before anything has moved: what comes too late once a parameter has.
inline void OpenWindow::check_can_step_in_backward(const Loss& loss, bool create_graph) const {
  if (!steps_in_backward()) return;
  TORCH_CHECK(!create_graph,
              "GradAccumulator: create_graph keeps the gradients, which in_backward frees as they arrive; "
              "leave one of the two out");
  TORCH_CHECK(!finite_required(loss.seed) && !state_->must_be_finite(),
              "GradAccumulator: a loss scaler looks at all gradients before the first parameter moves, and in_backward "
              "steps each as it arrives; use bfloat16, which needs no scaler, or leave in_backward out");
}

inline void OpenWindow::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph, bool fills) {
  check_usable();
  check_form(Form::weighted);
  TORCH_CHECK(!in_hand_, "GradAccumulator: a second backward() before step(); add the losses and call it once");
  TORCH_CHECK(!state_->applied(), "GradAccumulator: backward() after gradients().apply(); call step() first");
  loss.output.reset();  // backward does not need it: a language model's logits are large
  loss.target.reset();
  loss.check();
  check_weight(loss);
  check_can_step_in_backward(loss, create_graph);
  check_kept();
  check_only_ours();
  window_.add(loss.items);
  form_ = Form::weighted;
  in_hand_ = true;
  if (loss.items == 0) return;
  scaled_ = scaled_ || finite_required(loss.seed);
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
  check_form(Form::plain);
  window_.add(1.0);
  form_ = Form::plain;
  in_hand_ = true;
}

inline void OpenWindow::complete_micro_batch() {
  check_usable();
  check_kept();
  if (following_) return settle(/*complete=*/true);
  if (full()) check_scaler();
  if (!in_hand_) count_plain();
  if (form_ == Form::weighted && !state_->applied()) check_only_ours();
  settle(full());
  in_hand_ = false;
}

inline bool OpenWindow::complete_early() {
  check_usable();
  if (window_.count() == 0 && !following_) return false;
  check_kept();
  TORCH_CHECK(
      in_hand_ || !touched(),
      "GradAccumulator: the gradients changed after the last step(); call step() for the last micro-batch, too, "
      "before flush()");
  check_scaler();
  settle(/*complete=*/true);
  in_hand_ = false;
  return true;
}

/// A `loss.backward()` of the user's own shows in the gradients.
inline const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  check_usable();
  check_kept();
  if (!in_hand_ && form_ != Form::weighted && touched()) count_plain();
  if (in_hand_ || following_) settle(full());
  return state_;
}

inline void OpenWindow::state(Archive& archive, const NameOf& name_of) {
  if (!archive.loading()) {
    check_usable();
    check_kept();
    TORCH_CHECK(!in_hand_ && (window_.count() == 0 || !touched()),
                "GradAccumulator: state() in the middle of a micro-batch; call step() first");
  }
  auto count = window_.count();
  auto first = window_.first_weight(), total = window_.total_weight();
  bool weighted = form_ == Form::weighted, scaled = scaled_;
  archive("micro_batches", count);
  archive("first_weight", first);
  archive("total_weight", total);
  archive("weighted", weighted);
  archive("scaled", scaled);
  auto sums = count > 0 ? state_->named_sums(name_of) : SumsByName();
  archive.tensors(sums.tensors());
  if (!archive.loading()) return;
  Window next = window_;
  next.resume(count, first, total);
  auto loaded = state_->take_sums(std::move(sums), name_of, archive.changes_allowed());
  archive.when_all_fit([=, this] {
    open(listed_);
    state_->set_sums(loaded);
    window_ = next;
    form_ = count == 0 ? Form::none : weighted ? Form::weighted : Form::plain;
    scaled_ = scaled;
    state_->set_weights(first, total);
    watch_.look(state_->all_parameters());
  });
}

/// Takes notice of the gradients as they are.
inline void OpenWindow::settle(bool complete) {
  if (reduced_) return;
  if (accumulate_in_) or_spoil([&] { state_->fold_into_sums(*accumulate_in_); });
  const bool seen = form_ == Form::weighted && !accumulate_in_ && !state_->applied();  // by backward, and checked since
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
