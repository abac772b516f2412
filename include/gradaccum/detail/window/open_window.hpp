// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <torch/nn/module.h>

#include <limits>

namespace gradaccum::detail {

class Communicator;
class Misuse;

/// The kind of a window's backward passes: `loss.backward()` (plain), `optimizer.backward(loss)` (weighted), or none
/// yet.
enum class WindowForm { none, plain, weighted };

struct WindowProgress {
  Window counter;
  std::shared_ptr<WindowGradients> gradients = {};  ///< shared with their handles, state included
  WindowForm form = WindowForm::none;
  bool in_hand = false;              ///< a micro-batch is pending: it has had its backward, and is not complete
  bool scaled = false;               ///< the losses were scaled, so the scale must be divided out
  bool closing_with_others = false;  ///< complete because other ranks close theirs
  bool has_peers = false, steps_in_backward = false;

  std::int64_t count() const { return counter.count(); }
  bool weighted() const { return form == WindowForm::weighted; }
  bool full() const { return closing_with_others || counter.full(); }
  /// Returns true once the window is summed over all ranks.
  bool reduced() const { return has_peers && gradients->complete(); }
  /// Returns true if other ranks may be adding to its sums.
  bool shared() const { return gradients->sending() || reduced(); }
  const std::vector<at::Tensor>& parameters() const { return gradients->all_parameters(); }
};

/// The window of one optimizer. Counts its micro-batches, keeps their sums, closes with a step, and opens the next.
class OpenWindow {
 public:
  /// Without `steps`, a window has any number of micro-batches, and `complete_early` completes it.
  explicit OpenWindow(std::unique_ptr<AnyOptimizer> optimizer,
                      std::int64_t steps = std::numeric_limits<std::int64_t>::max(),
                      std::optional<at::ScalarType> accumulate_in = {});
  OpenWindow& operator=(OpenWindow&&) = delete;
  ~OpenWindow();

  AnyOptimizer& optimizer() const { return *optimizer_; }
  /// Includes parameters that were added to the optimizer, which may happen at any time.
  void refresh_parameters();

  /// Runs backward. `fills`: this micro-batch completes the window, so parameters may be stepped in its backward.
  void backward(Loss loss, const BackwardOptions& options, bool fills = false);
  /// Completes the micro-batch, and counts it if its backward was plain.
  void complete_micro_batch();
  /// Runs backward and completes the micro-batch. `fills`: it completes the window, too.
  void add(Loss loss, bool fills);
  /// Completes the window before it is full. Returns false if it has no micro-batch.
  bool complete_early();
  /// Steps with the complete window, and opens the next. Clears the gradients if there was no update.
  StepResult close();
  void discard();

  /// Clears the gradients at a window's end, or in a window without a complete micro-batch.
  void clear(bool set_to_none = true);
  /// Clears gradients from before the window, which other code has left.
  void clear_others();
  /// Clears the gradients between windows. Inside a window, throws if other code has changed the gradients.
  void zero_grad(bool set_to_none);
  /// Stores the sums separately from `.grad` from now on, so that other code may clear `.grad` inside a window.
  void keep_sums_apart();

  /// Returns the window so far, including a pending micro-batch.
  const std::shared_ptr<WindowGradients>& so_far();
  /// Returns the window that is being closed.
  const std::shared_ptr<WindowGradients>& closing() const { return now_.gradients; }

  /// A copy of the window and its sums between two micro-batches, for go_back().
  struct Copy {
    Window window;
    WindowForm form;
    bool scaled;
    WindowSums::Loaded sums;
  };
  Copy copy() const { return {now_.counter, now_.form, now_.scaled, now_.gradients->sums().copies()}; }
  void go_back(const Copy& copy);

  /// The window as a part of a training state, by the parameters' names in a model, between two micro-batches.
  struct Named {
    OpenWindow& window;
    NameOf name_of;
    void state(Archive& archive) { window.state(archive, name_of); }
  };
  Named named(const torch::nn::Module& module) { return {*this, NameOf(module.named_parameters())}; }

  std::int64_t micro_steps() const { return now_.count() - now_.in_hand; }
  bool in_hand() const { return now_.in_hand; }
  bool ready() const { return now_.closing_with_others || micro_steps() + 1 >= now_.counter.steps(); }
  bool closes_with_others() const { return now_.closing_with_others; }
  bool full() const { return now_.full(); }
  bool scaled() const { return now_.scaled; }  ///< the losses were multiplied by a loss scaler
  /// Returns true if the window has weight, including other ranks' weight once it is complete.
  bool has_weight() const { return now_.gradients->items() > 0; }
  std::int64_t steps() const { return now_.counter.steps(); }
  void set_steps(std::int64_t steps) { now_.counter.set_steps(steps); }
  void set_steps_of_this(std::int64_t steps) { now_.counter.set_steps_of_this(steps); }
  std::int64_t bytes() const;  ///< the size of the sums
  void set_accumulate_in(std::optional<at::ScalarType> dtype);
  /// Makes the backward pass that fills the window step each parameter when its gradient arrives.
  void set_in_backward(bool on);
  bool steps_in_backward() const { return now_.steps_in_backward; }

  /// Sums each window over these ranks when it is complete.
  void set_peers(std::shared_ptr<Communicator> peers);
  const std::shared_ptr<Communicator>& peers() const { return peers_; }
  /// Called when this rank has no more micro-batches. Returns true if other ranks have some: this window, even if
  /// empty, is then complete with theirs. Clears the gradients of an empty window, which other code has left.
  bool others_continue();

  /// Runs `work`. An exception in it leaves gradients incomplete: the window must then be discarded.
  void or_spoil(c10::function_ref<void()> work);

 private:
  void open(const std::vector<at::Tensor>& parameters);
  void state(Archive& archive, const NameOf& name_of);
  void resume(const Copy& window);
  void run_backward(const Loss& loss, const BackwardOptions& options, bool fills);
  void count_plain();
  void end_micro_batch();
  void finish_micro_batch(bool complete);

  std::unique_ptr<AnyOptimizer> optimizer_;
  std::shared_ptr<Communicator> peers_;
  std::vector<at::Tensor> listed_;  // the parameters as the optimizer lists them
  bool sums_apart_ = false;
  WindowProgress now_;
  const std::unique_ptr<Misuse> misuse_;
};

/// Runs `backward`, and steps each parameter of `window` when its gradient arrives. The window's factor and weights
/// must be complete.
void step_in_backward(const std::shared_ptr<WindowGradients>& window, AnyOptimizer& optimizer,
                      c10::function_ref<void()> backward);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/open_window.ipp>
#include <gradaccum/impl/window/step_in_backward.ipp>
#endif
