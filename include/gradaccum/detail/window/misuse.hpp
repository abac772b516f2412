// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/close_watch.hpp>
#include <gradaccum/detail/window/gradient_watch.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gradaccum {
struct BackwardOptions;
struct Loss;
}  // namespace gradaccum

namespace gradaccum::detail {

/// Whose backward a window has: plain, the user's `loss.backward()`; weighted, `optimizer.backward(loss)`.
enum class WindowForm { none, plain, weighted };

/// How far an open window has come.
struct WindowProgress {
  Window counter;
  std::shared_ptr<WindowGradients> gradients = {};  ///< with the state that handles of them see
  WindowForm form = WindowForm::none;
  bool in_hand = false;    ///< a micro-batch, from its backward on until the window has taken notice of it
  bool scaled = false;     ///< by a loss scaler: that has to be divided out
  bool following = false;  ///< complete, for the sake of other processes
  bool has_peers = false, steps_in_backward = false;

  std::int64_t count() const { return counter.count(); }
  bool weighted() const { return form == WindowForm::weighted; }
  bool full() const { return following || counter.full(); }
  /// It is the window of all processes now.
  bool reduced() const { return has_peers && gradients->complete(); }
  /// Other processes may be at its sums.
  bool shared() const { return gradients->sending() || reduced(); }
  const std::vector<at::Tensor>& parameters() const { return gradients->all_parameters(); }
};

/// Knows what must not be done to an open window. The window calls it at each event; it throws, or warns, and says what
/// to do instead.
class Misuse {
 public:
  explicit Misuse(const WindowProgress& window) : window_(window) {}

  /// A window is to be opened with these parameters; may throw, and nothing has changed then.
  void before_open(const std::vector<at::Tensor>& parameters) { close_watch_.follow(parameters); }
  /// `after_another`: whose gradients have not been cleared.
  void opened(bool after_another);
  void cleared() { after_another_ = false; }
  /// The list of parameters has changed.
  void follow(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);
  /// Takes notice of the gradients as they are.
  void look();
  void end_micro_batch() { close_watch_.count(); }

  void at_backward(const Loss& loss, const BackwardOptions& options) const;
  void at_plain_backward();
  void at_step() const;
  /// The micro-batch has been counted, or was in hand.
  void after_count();
  void at_flush() const;
  void at_save() const;
  void at_zero_grad() const;
  /// An exception has left the window's gradients incomplete, or they vanished.
  void check_usable() const;
  void check_kept() const;
  /// The gradients are what backward has left.
  void check_not_rewritten() const;
  /// Somebody else's backward, or anything else, has written to a gradient.
  bool touched() const;

 private:
  void check_form(WindowForm form) const;
  void check_scaler() const;
  void check_only_ours() const;
  bool watches_closely() const;

  const WindowProgress& window_;
  GradientWatch watch_;
  CloseWatch close_watch_;
  bool after_another_ = false;
};

void check_goes_with_peers(bool peers, bool in_backward);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/misuse.ipp>
#endif
