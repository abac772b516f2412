// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/close_watch.hpp>
#include <gradaccum/detail/window/gradient_watch.hpp>
#include <gradaccum/detail/window/step_in_backward.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/detail/window/window_sums.hpp>
#include <gradaccum/detail/window/window_use.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

class NameOf;
class Peers;

/// The window that an accumulator has open: counts its micro-batches, keeps their sums, and notices misuse. Knows no
/// optimizer.
class OpenWindow {
 public:
  OpenWindow(std::int64_t steps, std::optional<at::ScalarType> accumulate_in);
  OpenWindow(const OpenWindow&) = delete;
  OpenWindow& operator=(const OpenWindow&) = delete;
  ~OpenWindow();

  /// The old window is over, a new one begins.
  void open(const std::vector<at::Tensor>& parameters);
  /// Parameters may be added to the optimizer at any time.
  void follow(const std::vector<at::Tensor>& parameters);
  /// The gradients have been cleared before the first micro-batch was complete: what was in hand is gone.
  void cleared(const std::vector<at::Tensor>& parameters);

  /// `fills`: the window is complete with this micro-batch, and in backward is when it may be stepped.
  void backward(Loss loss, const BackwardOptions& options, bool fills = false);
  /// What the user would clear is of this window, and stays. Throws if there is something else in it.
  void check_not_to_be_cleared() const;
  /// From now on others may clear the gradients in the middle of a window: its sums are not there.
  void keep_sums_apart();
  /// Counts the micro-batch in hand, if it has not been counted, and completes it.
  void complete_micro_batch();
  /// Makes the window as it is a complete one; false if there is no micro-batch in it.
  bool complete_early();
  /// The window so far, the micro-batch in hand included.
  const std::shared_ptr<WindowGradients>& so_far();
  /// The window that is being closed.
  const std::shared_ptr<WindowGradients>& closing() const { return state_; }

  /// Between two micro-batches: the window as it is, with copies of its sums, to go back to.
  struct Copy {
    Window window;
    WindowUse use;
    WindowSums::Loaded sums;
  };
  Copy copy() const { return {window_, use_, state_->sums().copies()}; }
  void go_back(const Copy& copy);

  /// Between two micro-batches: saves the window, or goes on with one that was saved.
  void state(Archive& archive, const NameOf& name_of);

  std::int64_t micro_steps() const { return window_.count() - use_.in_hand(); }
  bool in_hand() const { return use_.in_hand(); }
  bool ready() const { return micro_steps() + 1 >= window_.steps(); }
  bool follows_others() const { return following_; }
  bool full() const { return following_ || window_.full(); }
  bool scaled() const { return use_.scaled(); }  ///< by a loss scaler
  /// Of the other processes, too, once it is complete.
  bool has_weight() const;
  std::int64_t steps() const { return window_.steps(); }
  void set_steps(std::int64_t steps) { window_.set_steps(steps); }
  /// Of this window alone.
  void set_steps_of_this(std::int64_t steps) { window_.set_steps_of_this(steps); }
  std::int64_t bytes() const;  ///< of its sums
  void set_accumulate_in(std::optional<at::ScalarType> dtype);
  /// The backward that fills the window steps each parameter by this, as its gradient arrives; none: nothing is
  /// stepped before the window closes.
  void set_step_in_backward(StepOfSome step);
  bool steps_in_backward() const { return step_in_backward_ != nullptr; }

  /// Each window becomes that of all these processes when it is complete.
  void set_peers(std::shared_ptr<Peers> peers);
  const std::shared_ptr<Peers>& peers() const { return peers_; }
  /// There are no more micro-batches here, and others have some: this window is complete with theirs, empty or not.
  bool others_continue();

  /// Runs `work`; an exception in it leaves gradients incomplete, and the window must not be stepped with.
  void or_spoil(c10::function_ref<void()> work);

 private:
  using Form = WindowUse::Form;

  void resume(const Window& window, const WindowUse& use, const WindowSums::Loaded& sums);

  void check_usable() const;
  void check_kept() const;
  void check_only_ours() const;
  void check_cleared() const;
  void check_not_rewritten() const;
  bool watches_closely() const;
  bool touched() const;
  void count_plain();
  void end_micro_batch();
  /// Takes notice of the gradients as they are.
  void look();
  void settle(bool complete);
  void reduce();

  Window window_;
  std::optional<at::ScalarType> accumulate_in_;
  StepOfSome step_in_backward_;
  std::shared_ptr<Peers> peers_;
  std::vector<at::Tensor> listed_;  // the parameters as the optimizer lists them
  std::shared_ptr<WindowGradients> state_;
  GradientWatch watch_;
  CloseWatch close_watch_;
  WindowUse use_;
  bool sums_apart_ = false;
  bool after_another_ = false;  // whose gradients have not been cleared
  bool following_ = false;      // complete, for the others' sake
  bool shared_ = false;         // other processes may be at its sums
  bool reduced_ = false;        // it is the window of all processes now
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/open_window.ipp>
#endif
