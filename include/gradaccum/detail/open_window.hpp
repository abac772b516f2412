// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/snapshot.hpp>
#include <gradaccum/detail/window_gradients.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
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

  /// The old window is over, a new one begins.
  void open(const std::vector<at::Tensor>& parameters);
  /// Parameters may be added to the optimizer at any time.
  void follow(const std::vector<at::Tensor>& parameters);

  void backward(Loss loss, std::optional<bool> retain_graph, bool create_graph);
  /// Counts the micro-batch in hand, if `backward` has not, and completes it.
  void complete_micro_batch();
  /// Whatever is in hand becomes the last micro-batch of a shorter window; false if there is none at all.
  bool complete_early();
  /// The window so far, the micro-batch in hand included.
  Gradients& gradients();
  /// The window that is being closed.
  Gradients& closing() { return *gradients_; }

  std::int64_t micro_steps() const { return window_.count() - in_hand_; }
  bool ready() const { return micro_steps() + 1 >= window_.steps(); }
  bool full() const { return window_.full(); }
  bool has_weight() const { return window_.total_weight() > 0; }
  std::int64_t steps() const { return window_.steps(); }
  void set_steps(std::int64_t steps) { window_.set_steps(steps); }

  /// An exception left the gradients incomplete: they must not be stepped with.
  void spoil() { spoiled_ = true; }
  /// The gradients have been cleared before the first micro-batch was complete: what was in hand is gone.
  void cleared(const std::vector<at::Tensor>& parameters);

 private:
  enum class Form { none, plain, weighted };

  void check_usable() const {
    TORCH_CHECK(!spoiled_, "GradAccumulator: an exception left this window's gradients incomplete; call discard()");
  }
  void check_not_mixed(Form form) const {
    TORCH_CHECK(form_ == Form::none || form_ == form,
                "GradAccumulator: one window mixes optimizer.backward(loss) with loss.backward(); use one of them");
  }
  void check_kept() const;
  void count_plain();
  void count_in_hand();
  void fold();
  void tell_gradients(bool complete);
  std::vector<at::Tensor> current() const;

  Window window_;
  std::optional<at::ScalarType> accumulate_in_;
  std::vector<at::Tensor> listed_;  // the parameters as the optimizer lists them
  std::shared_ptr<WindowGradients> state_;
  std::optional<Gradients> gradients_;
  Snapshot seen_;  // every .grad when the last micro-batch was complete
  Form form_ = Form::none;
  bool in_hand_ = false, spoiled_ = false;
};

inline void OpenWindow::open(const std::vector<at::Tensor>& parameters) {
  auto next = std::make_shared<WindowGradients>(parameters);  // may throw: then nothing has changed
  if (state_) state_->close();
  state_ = std::move(next);
  gradients_.emplace(state_);
  listed_ = parameters;
  window_.restart();
  form_ = Form::none;
  in_hand_ = spoiled_ = false;
  seen_ = Snapshot(current());
  tell_gradients(false);
}

inline void OpenWindow::follow(const std::vector<at::Tensor>& parameters) {
  auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (std::equal(parameters.begin(), parameters.end(), listed_.begin(), listed_.end(), same)) return;
  check_kept();
  state_->set_parameters(parameters);
  listed_ = parameters;
  seen_ = Snapshot(current());
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

inline void OpenWindow::check_kept() const {
  if (window_.count() == 0) return;
  const auto& parameters = state_->all_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    TORCH_CHECK(!seen_.lost(i, parameters[i].grad()), "GradAccumulator: the gradient of parameter ", i, " (shape ",
                parameters[i].sizes(),
                ") vanished inside a window; call optimizer.zero_grad(), which waits for the window's end, "
                "in place of model->zero_grad()");
}

inline void OpenWindow::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph) {
  check_usable();
  check_not_mixed(Form::weighted);
  TORCH_CHECK(!in_hand_, "GradAccumulator: a second backward() before step(); add the losses and call it once");
  Window::check_weight(loss.items);
  loss.check();
  check_kept();
  window_.add(loss.items);
  form_ = Form::weighted;
  in_hand_ = true;
  if (loss.items == 0) return;
  loss.seed.multiply(loss.items);
  loss.seed.divide(window_.first_weight());
  try {
    loss.backward(retain_graph, create_graph);
  } catch (...) {  // some gradients may have this micro-batch's part, others not
    spoil();
    throw;
  }
}

inline void OpenWindow::count_plain() {
  check_not_mixed(Form::plain);
  window_.add(1.0);
  form_ = Form::plain;
}

inline void OpenWindow::complete_micro_batch() {
  check_usable();
  check_kept();
  if (!in_hand_) count_plain();
  in_hand_ = false;
  fold();
  seen_ = Snapshot(current());
  tell_gradients(full());
}

/// A `loss.backward()` of the user's own shows in the gradients.
inline void OpenWindow::count_in_hand() {
  if (in_hand_ || form_ == Form::weighted) return;
  const auto gradients = current();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || seen_.untouched(i, gradients[i])) continue;
    count_plain();
    in_hand_ = true;
    return;
  }
}

inline bool OpenWindow::complete_early() {
  check_usable();
  check_kept();
  count_in_hand();
  if (window_.count() == 0) return false;
  in_hand_ = false;
  fold();
  tell_gradients(true);
  return true;
}

inline Gradients& OpenWindow::gradients() {
  check_usable();
  check_kept();
  count_in_hand();
  fold();
  tell_gradients(full());
  return *gradients_;
}

/// Adds 16-bit gradients to their sums in a wider dtype. `.grad` is free again: the next backward need not add to it.
inline void OpenWindow::fold() {
  if (!accumulate_in_ || state_->applied()) return;
  at::NoGradGuard no_grad;
  const auto& parameters = state_->all_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& gradient = parameters[i].mutable_grad();
    auto& sum = state_->sums()[i];
    if (!gradient.defined() || at::elementSize(gradient.scalar_type()) >= at::elementSize(*accumulate_in_)) continue;
    if (sum.defined())
      sum.add_(gradient);
    else
      sum = gradient.detach().to(*accumulate_in_);
    gradient.reset();
  }
}

inline void OpenWindow::tell_gradients(bool complete) {
  state_->set_weights(window_.first_weight(), window_.total_weight());
  state_->set_complete(complete);
}

}  // namespace gradaccum::detail
