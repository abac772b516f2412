// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gradaccum::detail {

class GradReadyScope;
class WatchedParameters;

/// Watches a few parameters closely, for leftovers of accumulation by hand in a loop: clipping inside a window, a step
/// of the wrapped optimizer's own, or a missing zero_grad().
///
/// It follows each gradient in backward. On the CPU it samples numbers, which shows writes that version counters miss.
class CloseWatch {
 public:
  CloseWatch();
  CloseWatch(const CloseWatch&) = delete;
  CloseWatch& operator=(const CloseWatch&) = delete;
  ~CloseWatch();

  /// Watches some of these parameters from now on.
  void refresh_parameters(const std::vector<at::Tensor>& parameters);
  /// Opens a window in which parameters must not change after the first micro-batch. Call `look` first.
  void open();
  /// Records the gradients as correct.
  void look();
  /// Counts a micro-batch of this window.
  void count();

  /// The smallest number of backward passes in this micro-batch over the parameters that backward has reached.
  std::int64_t passes() const;
  /// Warns, once, if a parameter is not what it was in the window's first micro-batch. A warning only, since code that
  /// perturbs and restores parameters, or a forward pass that writes to them, is legitimate.
  void watch_parameters();
  /// Throws if anything else has written to the gradients since backward or `look`. `of_backward_alone`: checks only
  /// the parameters that backward has reached in this micro-batch.
  void check_gradients(bool of_backward_alone) const;
  /// Throws if backward has added to gradients that were there when the window began.
  void check_cleared() const;
  /// Warns of as many passes in a micro-batch as a window has `steps`: the loop seems to count by itself.
  void warn_of_passes(std::int64_t steps);

 private:
  std::shared_ptr<WatchedParameters> watched_;
  std::unique_ptr<GradReadyScope> hearing_;
  bool warned_of_passes_ = false, warned_of_parameters_ = false;
};

}  // namespace gradaccum::detail

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
  bool in_hand = false;              ///< a micro-batch has had its backward, and is not complete
  bool scaled = false;               ///< the losses were scaled, so the scale has to be divided out
  bool closing_with_others = false;  ///< complete because other processes close theirs
  bool has_peers = false, steps_in_backward = false;

  std::int64_t count() const { return counter.count(); }
  bool weighted() const { return form == WindowForm::weighted; }
  bool full() const { return closing_with_others || counter.full(); }
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
  void before_open(const std::vector<at::Tensor>& parameters) { close_watch_.refresh_parameters(parameters); }
  /// `after_another`: another window came before, and its gradients have not been cleared.
  void opened(bool after_another);
  void cleared() { after_another_ = false; }
  /// Called when the list of parameters has changed.
  void refresh_parameters(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);
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
#include <gradaccum/impl/window/misuse.ipp>
#endif
