// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/misuse.hpp>
#include <gradaccum/detail/window/step_in_backward.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/detail/window/window_sums.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

class Peers;

/// The window of one optimizer: counts its micro-batches, keeps their sums, closes with a step, and opens the next.
///
/// How far it has come is `WindowProgress`; what must not happen then is for `Misuse` to say.
class OpenWindow {
 public:
  OpenWindow(std::unique_ptr<AnyOptimizer> optimizer, std::int64_t steps, std::optional<at::ScalarType> accumulate_in);
  /// Of as many micro-batches as its owner likes: `complete_early` makes it a complete one.
  explicit OpenWindow(std::unique_ptr<AnyOptimizer> optimizer);
  OpenWindow(const OpenWindow&) = delete;
  OpenWindow& operator=(const OpenWindow&) = delete;
  ~OpenWindow();

  AnyOptimizer& optimizer() const { return *optimizer_; }
  /// Parameters may be added to the optimizer at any time.
  void follow();

  /// `fills`: the window is complete with this micro-batch, and in backward is when it may be stepped.
  void backward(Loss loss, const BackwardOptions& options, bool fills = false);
  /// Counts the micro-batch in hand, if it has not been counted, and completes it.
  void complete_micro_batch();
  /// Backward of a micro-batch, which is complete then. `fills`: so is the window.
  void add(Loss loss, bool fills);
  /// Makes the window as it is a complete one; false if there is no micro-batch in it.
  bool complete_early();
  /// Steps with the window, which is complete, and opens the next. Where the parameters do not move, the gradients are
  /// cleared.
  StepResult close();
  void discard();

  /// Clears the gradients: at a window's end, or of one in which no micro-batch is complete.
  void clear(bool set_to_none = true);
  /// Clears gradients that are there before the window has begun: they are of something else.
  void clear_others();
  /// What the user would clear is of this window, and stays. Throws if there is something else in it.
  void check_not_to_be_cleared() const { misuse_.at_zero_grad(); }
  /// From now on others may clear the gradients in the middle of a window: its sums are not there.
  void keep_sums_apart();

  /// The window so far, the micro-batch in hand included.
  const std::shared_ptr<WindowGradients>& so_far();
  /// The window that is being closed.
  const std::shared_ptr<WindowGradients>& closing() const { return now_.gradients; }

  /// Between two micro-batches: the window as it is, with copies of its sums, to go back to.
  struct Copy {
    Window window;
    WindowForm form;
    bool scaled;
    WindowSums::Loaded sums;
  };
  Copy copy() const { return {now_.counter, now_.form, now_.scaled, now_.gradients->sums().copies()}; }
  void go_back(const Copy& copy);

  /// As a part of a training state, between two micro-batches, by the names that a model gives the parameters.
  struct Named {
    OpenWindow& window;
    NameOf name_of;
    void state(Archive& archive) { window.state(archive, name_of); }
  };
  Named named(const torch::nn::Module& module) { return {*this, NameOf(module.named_parameters())}; }

  std::int64_t micro_steps() const { return now_.count() - now_.in_hand; }
  bool in_hand() const { return now_.in_hand; }
  bool ready() const { return micro_steps() + 1 >= now_.counter.steps(); }
  bool follows_others() const { return now_.following; }
  bool full() const { return now_.full(); }
  bool scaled() const { return now_.scaled; }  ///< by a loss scaler
  /// Of the other processes, too, once it is complete.
  bool has_weight() const { return now_.gradients->items() > 0; }
  std::int64_t steps() const { return now_.counter.steps(); }
  void set_steps(std::int64_t steps) { now_.counter.set_steps(steps); }
  /// Of this window alone.
  void set_steps_of_this(std::int64_t steps) { now_.counter.set_steps_of_this(steps); }
  std::int64_t bytes() const;  ///< of its sums
  void set_accumulate_in(std::optional<at::ScalarType> dtype);
  /// The backward that fills the window steps each parameter as its gradient arrives.
  void set_in_backward(bool on);
  bool steps_in_backward() const { return now_.steps_in_backward; }

  /// Each window becomes that of all these processes when it is complete.
  void set_peers(std::shared_ptr<Peers> peers);
  const std::shared_ptr<Peers>& peers() const { return peers_; }
  /// There are no more micro-batches here, and others have some: this window is complete with theirs, empty or not.
  /// What lies in the gradients of a window that is empty is of something else.
  bool others_continue();

  /// Runs `work`; an exception in it leaves gradients incomplete, and the window must not be stepped with.
  void or_spoil(c10::function_ref<void()> work);

 private:
  /// The old window is over, a new one begins.
  void open(const std::vector<at::Tensor>& parameters);
  void state(Archive& archive, const NameOf& name_of);
  void resume(const Copy& window);
  void run_backward(const Loss& loss, const BackwardOptions& options, bool fills);
  void count_plain();
  void end_micro_batch();
  void settle(bool complete);

  std::unique_ptr<AnyOptimizer> optimizer_;
  std::optional<at::ScalarType> accumulate_in_;
  StepOfSome step_in_backward_;
  std::shared_ptr<Peers> peers_;
  std::vector<at::Tensor> listed_;  // the parameters as the optimizer lists them
  bool sums_apart_ = false;
  WindowProgress now_;
  Misuse misuse_{now_};
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/open_window.ipp>
#endif
