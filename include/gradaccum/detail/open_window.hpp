// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/snapshot.hpp>
#include <gradaccum/detail/window_gradients.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
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
  OpenWindow(std::int64_t steps, std::optional<at::ScalarType> accumulate_in)
      : window_(steps), accumulate_in_(accumulate_in) {
    TORCH_CHECK(!accumulate_in || at::isFloatingType(*accumulate_in),
                "GradAccumulator: accumulate_in must be a floating dtype, got ", *accumulate_in);
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

  void backward(Loss loss, std::optional<bool> retain_graph, bool create_graph);
  /// Counts the micro-batch in hand, if it has not been counted, and completes it.
  void complete_micro_batch();
  /// Makes the window as it is a complete one; false if there is no micro-batch in it.
  bool complete_early();
  /// The window so far, the micro-batch in hand included.
  const std::shared_ptr<WindowGradients>& so_far();
  /// The window that is being closed.
  const std::shared_ptr<WindowGradients>& closing() const { return state_; }

  std::int64_t micro_steps() const { return window_.count() - in_hand_; }
  bool ready() const { return micro_steps() + 1 >= window_.steps(); }
  bool full() const { return window_.full(); }
  bool has_weight() const { return window_.total_weight() > 0; }
  std::int64_t steps() const { return window_.steps(); }
  void set_steps(std::int64_t steps) { window_.set_steps(steps); }

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
    TORCH_CHECK(!spoiled_, "GradAccumulator: an exception left this window's gradients incomplete; call discard()");
  }
  void check_form(Form form) const {
    TORCH_CHECK(form_ == Form::none || form_ == form,
                "GradAccumulator: one window mixes optimizer.backward(loss) with loss.backward() or with a step() that "
                "no backward precedes; use one form");
  }
  void check_kept() const;
  void check_only_ours() const;
  void check_weight(const Loss& loss) const;
  bool touched() const;
  void count_plain();
  void settle(bool complete);
  void fold();
  void fold(at::Tensor& sum, at::Tensor& gradient) const;
  std::vector<at::Tensor> current() const;

  Window window_;
  std::optional<at::ScalarType> accumulate_in_;
  std::vector<at::Tensor> listed_;  // the parameters as the optimizer lists them
  std::shared_ptr<WindowGradients> state_;
  Snapshot seen_;  // every .grad when the window last took notice of them
  Form form_ = Form::none;
  bool in_hand_ = false;  // the last micro-batch is counted, but not complete
  bool spoiled_ = false;
};

inline void OpenWindow::open(const std::vector<at::Tensor>& parameters) {
  auto next = std::make_shared<WindowGradients>(parameters);  // may throw: then nothing has changed
  if (state_) state_->close();
  state_ = std::move(next);
  listed_ = parameters;
  window_.restart();
  form_ = Form::none;
  in_hand_ = spoiled_ = false;
  state_->set_weights(0, 0);
  state_->set_complete(false);
  seen_ = Snapshot(current());
}

inline void OpenWindow::follow(const std::vector<at::Tensor>& parameters) {
  auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (std::equal(parameters.begin(), parameters.end(), listed_.begin(), listed_.end(), same)) return;
  check_kept();
  const auto before = state_->all_parameters();
  state_->set_parameters(parameters);
  std::vector<std::size_t> from;  // a parameter that is new has not been seen with a gradient
  for (auto& parameter : state_->all_parameters())
    from.push_back(std::find_if(before.begin(), before.end(), [&](auto& b) { return b.is_same(parameter); }) -
                   before.begin());
  seen_ = seen_.rearranged(from);
  listed_ = parameters;
}

inline void OpenWindow::cleared(const std::vector<at::Tensor>& parameters) {
  if (in_hand_ || spoiled_ || state_->applied()) return open(parameters);
  seen_ = Snapshot(current());
}

inline std::vector<at::Tensor> OpenWindow::current() const {
  std::vector<at::Tensor> gradients;
  gradients.reserve(state_->all_parameters().size());
  for (auto& parameter : state_->all_parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

/// Backward continues a sum in place; in a new tensor if it records a graph, or if a dense part joins a sparse one.
inline void OpenWindow::check_kept() const {
  if (window_.count() == 0) return;
  const auto gradients = current();
  const bool graph =
      std::any_of(gradients.begin(), gradients.end(), [](auto& g) { return g.defined() && g.requires_grad(); });
  for (std::size_t i = 0; i < gradients.size(); ++i)
    TORCH_CHECK(!seen_.gone(i, gradients[i]) && (graph || !seen_.replaced(i, gradients[i])),
                "GradAccumulator: the gradient of parameter ", i, " (shape ", state_->all_parameters()[i].sizes(),
                ") vanished inside a window; call optimizer.zero_grad(), which waits for the window's end, in place of "
                "model->zero_grad()");
}

/// Somebody else's backward, or anything else, has written to a gradient since the window last took notice.
inline bool OpenWindow::touched() const {
  const auto gradients = current();
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (gradients[i].defined() && !seen_.untouched(i, gradients[i])) return true;
  return false;
}

/// In the weighted form every part of a sum has come by `backward`. What was there before the window does not matter.
inline void OpenWindow::check_only_ours() const {
  const auto gradients = current();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const bool changed = gradients[i].defined() && !seen_.untouched(i, gradients[i]);
    TORCH_CHECK(!changed || (window_.count() == 0 && seen_.had(i)), "GradAccumulator: the gradient of parameter ", i,
                " (shape ", state_->all_parameters()[i].sizes(),
                ") changed outside optimizer.backward(loss); one window must not mix it with loss.backward(), and code "
                "that changes gradients goes inside `if (optimizer.ready()) { optimizer.gradients().apply(); … }`");
  }
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

inline void OpenWindow::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph) {
  check_usable();
  check_form(Form::weighted);
  TORCH_CHECK(!in_hand_, "GradAccumulator: a second backward() before step(); add the losses and call it once");
  TORCH_CHECK(!state_->applied(), "GradAccumulator: backward() after gradients().apply(); call step() first");
  loss.check();
  check_weight(loss);
  check_kept();
  check_only_ours();
  window_.add(loss.items);
  form_ = Form::weighted;
  in_hand_ = true;
  if (loss.items == 0) return;
  loss.seed.multiply(loss.items);
  loss.seed.divide(window_.first_weight());
  or_spoil([&] { loss.backward(retain_graph, create_graph); });
  seen_ = Snapshot(current());
}

inline void OpenWindow::count_plain() {
  check_form(Form::plain);
  window_.add(1.0);
  form_ = Form::plain;
  in_hand_ = true;
}

inline void OpenWindow::complete_micro_batch() {
  check_usable();
  check_kept();
  if (!in_hand_) count_plain();
  if (form_ == Form::weighted && !state_->applied()) check_only_ours();
  settle(full());
  in_hand_ = false;
}

inline bool OpenWindow::complete_early() {
  check_usable();
  if (window_.count() == 0) return false;
  check_kept();
  TORCH_CHECK(
      in_hand_ || !touched(),
      "GradAccumulator: the gradients changed after the last step(); call step() for the last micro-batch, too, "
      "before flush()");
  settle(/*complete=*/true);
  in_hand_ = false;
  return true;
}

/// A `loss.backward()` of the user's own shows in the gradients.
inline const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  check_usable();
  check_kept();
  if (!in_hand_ && form_ != Form::weighted && touched()) count_plain();
  if (in_hand_) settle(full());
  return state_;
}

/// Takes notice of the gradients as they are.
inline void OpenWindow::settle(bool complete) {
  or_spoil([&] { fold(); });
  seen_ = Snapshot(current());
  state_->set_weights(window_.first_weight(), window_.total_weight());
  state_->set_complete(complete);
}

/// Adds 16-bit gradients to their sums in a wider dtype. `.grad` is free again: the next backward need not add to it.
inline void OpenWindow::fold() {
  if (!accumulate_in_ || state_->applied()) return;
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < state_->all_parameters().size(); ++i) {
    auto& gradient = state_->all_parameters()[i].mutable_grad();
    if (gradient.defined() && at::elementSize(gradient.scalar_type()) < at::elementSize(*accumulate_in_))
      fold(state_->sums()[i], gradient);
  }
}

inline void OpenWindow::fold(at::Tensor& sum, at::Tensor& gradient) const {
  if (!sum.defined())
    sum = gradient.detach().to(*accumulate_in_);
  else if (sum.is_sparse() && !gradient.is_sparse())  // ATen adds a sparse tensor to a dense one, not the reverse
    sum = gradient.detach().to(*accumulate_in_).add_(sum);
  else
    sum.add_(gradient);
  gradient.reset();
}

}  // namespace gradaccum::detail
