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

/// The kind of backward that a window has: plain, the user's `loss.backward()`; weighted, `optimizer.backward(loss)`;
/// or none yet.
enum class WindowForm { none, plain, weighted };

/// The progress of an open window.
struct WindowProgress {
  Window counter;
  std::shared_ptr<WindowGradients> gradients = {};  ///< shared with their handles, state included
  WindowForm form = WindowForm::none;
  bool in_hand = false;    ///< a micro-batch has had its backward, and is not complete
  bool scaled = false;     ///< the losses were scaled, so the scale has to be divided out
  bool following = false;  ///< complete because other processes close theirs
  bool has_peers = false, steps_in_backward = false;

  std::int64_t count() const { return counter.count(); }
  bool weighted() const { return form == WindowForm::weighted; }
  bool full() const { return following || counter.full(); }
  /// True once the window is summed over all processes.
  bool reduced() const { return has_peers && gradients->complete(); }
  /// True if other processes may be adding to its sums.
  bool shared() const { return gradients->sending() || reduced(); }
  const std::vector<at::Tensor>& parameters() const { return gradients->all_parameters(); }
};

/// Detects misuse of an open window. The window calls it at each event; it throws or warns, with the remedy.
class Misuse {
 public:
  explicit Misuse(const WindowProgress& window) : window_(window) {}

  /// Called before a window with these parameters is opened. If it throws, nothing has changed.
  void before_open(const std::vector<at::Tensor>& parameters) { close_watch_.follow(parameters); }
  /// `after_another`: another window came before, and its gradients have not been cleared.
  void opened(bool after_another);
  void cleared() { after_another_ = false; }
  /// Called when the list of parameters has changed.
  void follow(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);
  /// Records the gradients as they are.
  void look();
  void end_micro_batch() { close_watch_.count(); }

  void at_backward(const Loss& loss, const BackwardOptions& options) const;
  void at_plain_backward();
  void at_step() const;
  /// Called once the micro-batch is counted.
  void after_count();
  void at_flush() const;
  void at_save() const;
  void at_zero_grad() const;
  /// Throws if an exception has left the window's gradients incomplete, or they vanished.
  void check_usable() const;
  void check_kept() const;
  /// Throws if anything but backward has written to the gradients.
  void check_not_rewritten() const;
  /// Returns true if another backward, or anything else, has written to a gradient.
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
