// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/open_window.hpp>

#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace gradaccum::detail {

inline constexpr const char* stepped_in_part =
    "an exception occurred after backward had stepped some of the parameters but not the others; load a saved state, "
    "or discard() the window and continue from here";

inline constexpr const char* not_cleared =
    "GradAccumulator: the gradients of the last window were not cleared (or only through .data(), which hides it), so "
    "backward adds to them; call optimizer.zero_grad() after every step(): it does nothing inside a window";

/// Watches a few parameters for remains of manual accumulation in a loop: clipping inside a window, a call of the
/// wrapped optimizer's step(), or a missing zero_grad().
///
/// Follows each gradient in backward, which runs a thread per device; each thread writes to its own records. On the CPU
/// it samples numbers, which shows writes that version counters miss.
class CloseWatch final : public GradReadyListener {
 public:
  struct Watched {
    SeenTensor gradient{{}};
    std::uint64_t sample = 0;          // a sample of the gradient
    std::int64_t passes = 0;           // backward passes in this micro-batch
    bool continued = false;            // each pass has added to an existing gradient
    bool written_between = false;      // by other code, before a pass that adds to this window
    std::optional<SeenTensor> tensor;  // the parameter as it was in the window's first micro-batch
    std::uint64_t tensor_sample = 0;
  };

  explicit CloseWatch(std::vector<at::Tensor> parameters)
      : GradReadyListener(std::move(parameters)), watched(parameters_.size()) {}

  bool waits_for_whole() const override { return false; }

  /// Counts a pass before other hooks, whose changes of the gradient belong to the pass.
  void added(std::size_t place) override {
    auto& one = watched[place];
    const auto& gradient = parameters_[place].grad();
    if (one.gradient.untouched(gradient)) return;  // hooks also run without a gradient
    const bool added = one.gradient.added_to(gradient), known = one.gradient.counts_alone(gradient);
    if (known && !added) one.written_between |= one.passes > 0 || !window_is_empty;
    one.continued = known && added && (one.continued || one.passes == 0);
    ++one.passes;
  }
  /// Records the gradient as correct.
  void grad_ready(std::size_t place) override {
    const auto& gradient = parameters_[place].grad();
    watched[place].gradient = SeenTensor(gradient);
    watched[place].sample = sample_of(gradient);
  }

  /// Records the gradients as correct, without reading numbers that are unchanged by LibTorch's version counter.
  void look() {
    for (std::size_t place = 0; place < watched.size(); ++place) {
      if (!watched[place].gradient.untouched(parameters_[place].grad())) grad_ready(place);
      watched[place].continued = watched[place].written_between = false;
    }
  }

  bool rewritten(std::size_t place) const {
    const auto& gradient = parameters_[place].grad();
    const auto& seen = watched[place];
    if (seen.written_between) return true;
    if (!seen.gradient.same(gradient)) return false;
    return (seen.gradient.counts_alone(gradient) && !seen.gradient.untouched(gradient)) ||
           seen.sample != sample_of(gradient);
  }

  std::vector<Watched> watched;
  bool window_is_empty = true;
};

/// Picks three parameters with gradients: the first, the middle and the last one.
inline std::vector<at::Tensor> some_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> learning;
  for (auto& parameter : parameters)
    if (parameter.requires_grad() && parameter.is_leaf()) learning.push_back(parameter);
  if (learning.size() <= 3) return learning;
  return {learning.front(), learning[(learning.size() - 1) / 2], learning.back()};
}

/// Checks that the seed of backward, the weight relative to the window's first one, fits the dtype of the loss.
inline void check_weight(const Loss& loss, double first_weight) {
  Window::check_weight(loss.items);
  if (loss.items == 0 || first_weight == 0) return;
  const double largest = loss.mean.scalar_type() == at::kHalf     ? 65504.0
                         : loss.mean.scalar_type() == at::kDouble ? 1e308
                                                                  : 3e38;
  TORCH_CHECK(loss.items / first_weight <= largest, "Loss: items must be at most ", largest,
              " times those of the window's first micro-batch (", first_weight, ") with a loss of dtype ",
              loss.mean.scalar_type(), ", got ", loss.items, "; compute the loss in a wider dtype");
}

/// Detects misuse of an open window. The window calls it at each event; it throws or warns, with advice.
class Misuse {
 public:
  explicit Misuse(const WindowProgress& window) : window_(window) {}

  /// Selects the parameters to watch. Called before a window with these parameters is opened: if it throws, nothing has
  /// changed.
  void before_open(const std::vector<at::Tensor>& parameters) {
    auto some = some_of(parameters);
    if (same_parameters(some, close_watch_->parameters())) return;
    auto next = std::make_shared<CloseWatch>(std::move(some));
    close_watch_scope_ = std::make_unique<GradReadyScope>(next);
    close_watch_ = std::move(next);
    close_watch_->look();
  }

  /// Called when a window is opened. `after_another`: the gradients of the previous window have not been cleared.
  void opened(bool after_another) {
    after_another_ = after_another;
    look();
    close_watch_->window_is_empty = true;
    for (auto& one : close_watch_->watched) one.passes = 0, one.tensor.reset();
  }

  void cleared() { after_another_ = false; }

  /// Updates the records after a change of the list of parameters. New ones are recorded without a gradient.
  void refresh_parameters(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after) {
    std::vector<SeenTensor> seen;
    for (auto& parameter : after) {
      const auto found = std::find_if(before.begin(), before.end(), [&](auto& b) { return b.is_same(parameter); });
      seen.push_back(found == before.end() ? SeenTensor({}) : seen_[static_cast<std::size_t>(found - before.begin())]);
    }
    seen_ = std::move(seen);
    before_open(after);
  }

  /// Records the current gradients as correct.
  void look() {
    seen_.clear();
    seen_.reserve(window_.parameters().size());
    for (auto& parameter : window_.parameters()) seen_.emplace_back(parameter.grad());
    if (!window_.shared()) close_watch_->look();
  }

  void end_micro_batch() {
    close_watch_->window_is_empty = false;
    for (auto& one : close_watch_->watched) one.passes = 0;
  }

  void at_backward(const Loss& loss, const BackwardOptions& options) {
    const auto& gradients = *window_.gradients;
    check_usable();
    TORCH_CHECK(!window_.closing_with_others,
                "GradAccumulator: backward() was called after others_continue() returned true, so other processes wait "
                "for this one to close a window; call step() first");
    check_form(WindowForm::weighted);
    TORCH_CHECK(!window_.in_hand,
                "GradAccumulator: backward() was called twice before step(); add the losses and call backward() once");
    TORCH_CHECK(!gradients.applied(),
                "GradAccumulator: backward() was called after gradients().apply(); call step() first");
    loss.check();
    warn_of_shapes(loss);
    check_weight(loss, window_.counter.first_weight());
    if (window_.steps_in_backward) {  // later checks would come after the first update
      TORCH_CHECK(!options.create_graph,
                  "GradAccumulator: create_graph keeps the gradients, but in_backward frees them as they arrive; use "
                  "only one of the two");
      TORCH_CHECK(!finite_required(loss.seed) && !gradients.must_be_finite(),
                  "GradAccumulator: a loss scaler must see all gradients before the first parameter is stepped, but "
                  "in_backward steps each parameter as its gradient arrives; use bfloat16, which needs no scaler, or "
                  "turn in_backward off");
    }
    check_kept();
    if (after_another_ && window_.count() == 0)
      for (std::size_t i = 0; i < window_.parameters().size(); ++i)
        TORCH_CHECK(!seen_[i].defined() || !seen_[i].untouched(window_.parameters()[i].grad()), not_cleared);
    check_only_ours();
  }

  void at_plain_backward() {
    TORCH_CHECK(!window_.steps_in_backward,
                "GradAccumulator: with in_backward, parameters are stepped during backward; before each step(), call "
                "optimizer.backward(loss) instead of loss.backward()");
    check_form(WindowForm::plain);
    check_not_rewritten();
    const auto steps = window_.counter.steps();
    if (after_another_ && window_.count() == 0 && steps > 1)
      for (auto& one : close_watch_->watched) TORCH_CHECK(!one.continued, not_cleared);
    warn_of_passes(steps);
  }

  void at_step() const {
    check_usable();
    check_kept();
    if (window_.full() && !window_.closing_with_others) check_scaler();
    if (window_.in_hand && !window_.closing_with_others) check_not_rewritten();
  }

  /// Called once the micro-batch is counted.
  void after_count() {
    if (watches_closely()) warn_of_moved_parameters();
    if (window_.weighted() && !window_.gradients->applied()) check_only_ours();
  }

  void at_flush() const {
    check_kept();
    TORCH_CHECK(
        window_.in_hand || !touched(),
        "GradAccumulator: the gradients changed after the last step(); call step() for the last micro-batch, too, "
        "before flush()");
    check_scaler();
    if (window_.count() > 1) check_not_rewritten();
  }

  void at_save() const {
    const auto count = window_.count();
    check_usable();
    check_kept();
    TORCH_CHECK(!window_.in_hand && (count == 0 || !touched()),
                "GradAccumulator: state() was called in the middle of a micro-batch; call step() first");
    TORCH_CHECK(!window_.gradients->elsewhere(),
                "GradAccumulator: with Shard::gradients, state() must be called between windows, but there are ", count,
                " micro-batches in the open window; save after a step() that returned true, or after flush()");
  }

  void at_zero_grad() const {
    TORCH_CHECK(window_.gradients->spoiled() || window_.in_hand || !touched(),
                "GradAccumulator: zero_grad() was called in the middle of a window whose gradients changed after the "
                "last step(). If a backward had no step(), call step() between each backward and zero_grad(). If a "
                "backward for other parameters, such as a GAN's generator, also reached these, name those that it is "
                "for: loss.backward({}, {}, false, generator->parameters()), or optimizer.backward(loss, {.inputs = "
                "generator->parameters()})");
  }

  /// Throws if an exception has left the window's gradients incomplete.
  void check_usable() const {
    const auto& gradients = *window_.gradients;
    TORCH_CHECK(!gradients.spoiled() || !gradients.stepped(), "GradAccumulator: ", stepped_in_part);
    TORCH_CHECK(!gradients.spoiled(),
                "GradAccumulator: an exception left this window's gradients incomplete; call discard()");
  }

  /// Throws if a sum has disappeared. Backward adds to a sum in place, or makes a new tensor if it records a graph, or
  /// if it adds a dense part to a sparse sum.
  void check_kept() const {
    if (window_.count() == 0) return;
    const auto& parameters = window_.parameters();
    const bool graph = std::any_of(parameters.begin(), parameters.end(),
                                   [](auto& p) { return p.grad().defined() && p.grad().requires_grad(); });
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& gradient = parameters[i].grad();
      const bool gone = seen_[i].defined() && !gradient.defined();
      TORCH_CHECK(
          !gone && (graph || !seen_[i].replaced(gradient)), "GradAccumulator: the gradient of parameter ", i,
          " (shape ", parameters[i].sizes(),
          ") vanished inside a window; call optimizer.zero_grad(), which waits for the window's end, in place of "
          "model->zero_grad()");
    }
  }

  /// Returns true if another backward pass, or other code, has written to a gradient.
  bool touched() const {
    if (window_.shared()) return false;
    for (std::size_t i = 0; i < window_.parameters().size(); ++i)
      if (touched(i)) return true;
    return false;
  }

 private:
  bool touched(std::size_t i) const {
    const auto& gradient = window_.parameters()[i].grad();
    return gradient.defined() && !seen_[i].untouched(gradient);
  }

  void check_form(WindowForm form) const {
    TORCH_CHECK(window_.form == WindowForm::none || window_.form == form,
                "GradAccumulator: one window mixes optimizer.backward(loss) with loss.backward(), or with a step() "
                "that no backward precedes; use one form for all its micro-batches");
  }

  /// Throws if the losses were scaled, but the gradients will not be divided by the scale.
  void check_scaler() const {
    TORCH_CHECK(!window_.scaled || window_.gradients->must_be_finite(),
                "GradAccumulator: the losses of this window are scaled, but optimizer.step() does not unscale its "
                "gradients; call scaler.step(optimizer) instead");
  }

  /// Throws if other code than `backward` has added to a sum of a weighted window. Ignores windows to which other ranks
  /// may add at any time.
  void check_only_ours() const {
    if (window_.shared()) return;
    const auto& parameters = window_.parameters();
    const bool window_is_empty = window_.count() == 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!touched(i)) continue;
      TORCH_CHECK(!window_is_empty || seen_[i].defined(), "GradAccumulator: parameter ", i, " (shape ",
                  parameters[i].sizes(),
                  ") has a gradient from before this window, which backward would add to; call optimizer.zero_grad() "
                  "before the first optimizer.backward(loss)");
      TORCH_CHECK(window_is_empty, "GradAccumulator: the gradient of parameter ", i, " (shape ", parameters[i].sizes(),
                  ") changed outside optimizer.backward(loss). If loss.backward() changed it, use one form for the "
                  "whole window. If a backward for other parameters reached it, such as a GAN's generator, write "
                  "optimizer.backward(loss, {.inputs = generator->parameters()}) there. If these parameters have two "
                  "accumulators, keep one. Other code that changes gradients goes inside `if (optimizer.ready()) { "
                  "optimizer.gradients().apply(); … }`");
    }
  }

  /// Returns false for windows of one micro-batch, which equal a step without an accumulator after any write.
  bool watches_closely() const {
    const auto& gradients = *window_.gradients;
    return window_.counter.steps() > 1 && !gradients.applied() && !gradients.stepped() && !window_.shared();
  }

  /// Throws if other code than backward has written to the gradients. In a plain window, ignores gradients that no
  /// backward pass of this micro-batch has reached, since they may be the user's.
  void check_not_rewritten() const {
    if (!watches_closely()) return;
    for (std::size_t place = 0; place < close_watch_->watched.size(); ++place) {
      if (!window_.weighted() && close_watch_->watched[place].passes == 0) continue;
      TORCH_CHECK(!close_watch_->rewritten(place), "GradAccumulator: the gradient of a parameter (shape ",
                  close_watch_->parameters()[place].sizes(),
                  ") changed between backward and step(), while it is an unfinished sum. If "
                  "torch::nn::utils::clip_grad_norm_ changed it, call optimizer.clip_grad_norm_(max) instead. If it "
                  "was divided by the number of micro-batches, delete the division: a window takes the mean. If "
                  "zero_grad(false) changed it, call optimizer.zero_grad() instead. Other code that changes gradients "
                  "goes inside `if (optimizer.ready()) { optimizer.gradients().apply(); … }`");
    }
  }

  /// Warns, once, if a parameter has changed since the window's first micro-batch. It is no error, since code may
  /// perturb and restore parameters, and a forward pass may write to them.
  void warn_of_moved_parameters() {
    for (std::size_t place = 0; place < close_watch_->watched.size(); ++place) {
      const auto& parameter = close_watch_->parameters()[place];
      auto& watched = close_watch_->watched[place];
      const auto sample = sample_of(parameter);
      const bool first = !watched.tensor;
      const bool moved =
          !first && (sample != 0 ? watched.tensor_sample != sample : !watched.tensor->untouched(parameter));
      if (first) watched.tensor = SeenTensor(parameter), watched.tensor_sample = sample;
      if (!moved || std::exchange(warned_of_parameters_, true)) continue;
      TORCH_WARN("GradAccumulator: a parameter (shape ", parameter.sizes(), ") ",
                 sample != 0 ? "moved" : "was written to",
                 " in the middle of a window, so the window no longer equals one large batch. If the wrapped "
                 "optimizer's own step() is called, delete that call: optimizer.step() makes it when the window is "
                 "full. Other code that changes parameters goes after a step() that returned true");
    }
  }

  /// Warns, once, of shapes such as [16, 1] and [16], which an elementwise loss broadcasts to [16, 16].
  void warn_of_shapes(const Loss& loss) {
    const auto &output = loss.output, &target = loss.target;
    if (warned_of_shapes_ || !output.defined() || !target.defined() || output.sizes() == target.sizes()) return;
    const bool compares = output.is_floating_point() && target.is_floating_point();
    if (!compares || !at::are_expandable(output.sizes(), target.sizes())) return;
    const auto both = at::infer_size(output.sizes(), target.sizes());
    if (c10::multiply_integers(both) <= std::max(output.numel(), target.numel())) return;
    warned_of_shapes_ = true;
    TORCH_WARN("GradAccumulator: the output has the shape ", output.sizes(), " and the target ", target.sizes(),
               ", which an elementwise loss such as mse_loss broadcasts to ", at::IntArrayRef(both),
               ": every output is compared with every target. Give both one shape, by view or unsqueeze");
  }

  /// Warns, once, if a micro-batch has `steps` backward passes: the loop probably counts micro-batches, too. Counts the
  /// passes of the watched parameter that backward has reached the fewest times.
  void warn_of_passes(std::int64_t steps) {
    if (steps < 2 || close_watch_->window_is_empty || warned_of_passes_) return;
    std::int64_t passes = 0;
    for (auto& one : close_watch_->watched)
      if (one.passes > 0) passes = passes == 0 ? one.passes : std::min(passes, one.passes);
    if (passes != steps) return;
    warned_of_passes_ = true;
    TORCH_WARN("GradAccumulator: ", steps,
               " backward passes preceded a step(), as many as .steps. If step() is inside ", "`if ((i + 1) % ", steps,
               " == 0)`, delete that `if`: step() counts by itself. If a micro-batch has ", steps,
               " losses, add them and call backward() once");
  }

  const WindowProgress& window_;
  std::vector<SeenTensor> seen_;  // the gradient of each parameter
  std::shared_ptr<CloseWatch> close_watch_ = std::make_shared<CloseWatch>(std::vector<at::Tensor>());
  std::unique_ptr<GradReadyScope> close_watch_scope_;
  bool after_another_ = false, warned_of_passes_ = false, warned_of_parameters_ = false, warned_of_shapes_ = false;
};

}  // namespace gradaccum::detail
