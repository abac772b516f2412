// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/misuse.hpp>

#include <gradaccum/detail/window/grad_ready_scope.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// The record of each watched parameter. Backward runs a thread for each device, and each writes to its own records.
class WatchedParameters final : public GradReadyListener {
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

  explicit WatchedParameters(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)), watched_(parameters_.size()) {}

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  std::vector<Watched>& all() { return watched_; }
  void end() override {}

  bool window_is_empty = true;

  /// Counts a pass before the hooks that add to gradients or mask them: those belong to the pass.
  void added(std::size_t place) override {
    auto& watched = watched_[place];
    const auto& gradient = parameters_[place].grad();
    if (watched.gradient.untouched(gradient)) return;  // hooks also run without a gradient
    const bool added = watched.gradient.added_to(gradient), known = watched.gradient.counts_alone(gradient);
    if (known && !added) watched.written_between |= watched.passes > 0 || !window_is_empty;
    watched.continued = known && added && (watched.continued || watched.passes == 0);
    ++watched.passes;
  }
  void grad_ready(std::size_t place) override { see(place); }
  bool waits_for_whole() const override { return false; }

  /// Records the gradient as correct.
  void see(std::size_t place) {
    const auto& gradient = parameters_[place].grad();
    watched_[place].gradient = SeenTensor(gradient);
    watched_[place].sample = sample_of(gradient);
  }
  /// Records the gradient, without reading its numbers if LibTorch's version counter shows that they are unchanged.
  void see_again(std::size_t place) {
    if (!watched_[place].gradient.untouched(parameters_[place].grad())) see(place);
  }

  bool rewritten(std::size_t place) const {
    const auto& gradient = parameters_[place].grad();
    const auto& seen = watched_[place];
    if (seen.written_between) return true;
    if (!seen.gradient.same(gradient)) return false;
    return (seen.gradient.counts_alone(gradient) && !seen.gradient.untouched(gradient)) ||
           seen.sample != sample_of(gradient);
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<Watched> watched_;
};

/// Picks the first, the last and those between at equal distances among the parameters that get a gradient.
GRADACCUM_INLINE std::vector<at::Tensor> some_of(const std::vector<at::Tensor>& parameters) {
  constexpr std::size_t enough = 3;
  std::vector<at::Tensor> learning, some;
  for (auto& parameter : parameters)
    if (parameter.requires_grad() && parameter.is_leaf()) learning.push_back(parameter);
  if (learning.size() <= enough) return learning;
  for (std::size_t i = 0; i < enough; ++i) some.push_back(learning[i * (learning.size() - 1) / (enough - 1)]);
  return some;
}

GRADACCUM_INLINE CloseWatch::CloseWatch() : watched_(std::make_shared<WatchedParameters>(std::vector<at::Tensor>())) {}
GRADACCUM_INLINE CloseWatch::~CloseWatch() = default;

GRADACCUM_INLINE void CloseWatch::refresh_parameters(const std::vector<at::Tensor>& parameters) {
  auto some = some_of(parameters);
  if (same_parameters(some, watched_->parameters())) return;
  auto watched = std::make_shared<WatchedParameters>(std::move(some));
  auto hearing = std::make_unique<GradReadyScope>(watched);
  watched_ = std::move(watched);
  hearing_ = std::move(hearing);
  look();
}

GRADACCUM_INLINE void CloseWatch::open() {
  watched_->window_is_empty = true;
  for (auto& watched : watched_->all()) watched.passes = 0, watched.tensor.reset();
}

GRADACCUM_INLINE void CloseWatch::look() {
  for (std::size_t place = 0; place < watched_->parameters().size(); ++place) watched_->see_again(place);
  for (auto& watched : watched_->all()) watched.continued = watched.written_between = false;
}

GRADACCUM_INLINE void CloseWatch::count() {
  watched_->window_is_empty = false;
  for (auto& watched : watched_->all()) watched.passes = 0;
}

GRADACCUM_INLINE std::int64_t CloseWatch::passes() const {
  std::int64_t least = 0;
  for (auto& watched : watched_->all())
    if (watched.passes > 0) least = least == 0 ? watched.passes : std::min(least, watched.passes);
  return least;
}

GRADACCUM_INLINE void CloseWatch::watch_parameters() {
  for (std::size_t place = 0; place < watched_->parameters().size(); ++place) {
    const auto& parameter = watched_->parameters()[place];
    auto& watched = watched_->all()[place];
    const auto sample = sample_of(parameter);
    const bool first = !watched.tensor;
    const bool moved =
        !first && (sample != 0 ? watched.tensor_sample != sample : !watched.tensor->untouched(parameter));
    if (first) watched.tensor = SeenTensor(parameter), watched.tensor_sample = sample;
    if (!moved || std::exchange(warned_of_parameters_, true)) continue;
    TORCH_WARN("GradAccumulator: a parameter (shape ", parameter.sizes(), ") ",
               sample != 0 ? "moved" : "was written to",
               " in the middle of a window, which is not the large batch then. By the wrapped optimizer's own step()? "
               "Delete it: optimizer.step() calls it where the window is full. Other code that changes parameters goes "
               "after a step() that returned true");
  }
}

GRADACCUM_INLINE void CloseWatch::check_gradients(bool of_backward_alone) const {
  for (std::size_t place = 0; place < watched_->parameters().size(); ++place) {
    if (of_backward_alone && watched_->all()[place].passes == 0) continue;
    TORCH_CHECK(!watched_->rewritten(place), "GradAccumulator: the gradient of a parameter (shape ",
                watched_->parameters()[place].sizes(),
                ") changed between backward and step(), where it is an unfinished sum. By "
                "torch::nn::utils::clip_grad_norm_? Delete it, and call optimizer.clip_grad_norm_(max). By a division "
                "by the number of micro-batches? Delete it: the window is a mean. By zero_grad(false)? Call "
                "optimizer.zero_grad(). Other code that changes gradients goes inside "
                "`if (optimizer.ready()) { optimizer.gradients().apply(); … }`");
  }
}

GRADACCUM_INLINE void CloseWatch::check_cleared() const {
  for (auto& watched : watched_->all()) TORCH_CHECK(!watched.continued, not_cleared);
}

GRADACCUM_INLINE void CloseWatch::warn_of_passes(std::int64_t steps) {
  if (steps < 2 || watched_->window_is_empty || warned_of_passes_ || passes() != steps) return;
  warned_of_passes_ = true;
  TORCH_WARN("GradAccumulator: ", steps, " backward passes before a step(), as many as .steps. If step() stands in ",
             "`if ((i + 1) % ", steps, " == 0)`, delete that `if`: step() counts by itself. If a micro-batch has ",
             steps, " losses, add them and call backward() once");
}

GRADACCUM_INLINE void Misuse::opened(bool after_another) {
  after_another_ = after_another;
  look();
  close_watch_.open();
}

GRADACCUM_INLINE void Misuse::refresh_parameters(const std::vector<at::Tensor>& before,
                                                 const std::vector<at::Tensor>& after) {
  watch_.refresh_parameters(before, after);
  close_watch_.refresh_parameters(after);
}

GRADACCUM_INLINE void Misuse::look() {
  watch_.look(window_.parameters());
  if (!window_.shared()) close_watch_.look();
}

/// Checks that the seed of backward, the weight relative to the window's first one, fits the dtype of the loss.
GRADACCUM_INLINE void check_weight(const Loss& loss, double first_weight) {
  Window::check_weight(loss.items);
  if (loss.items == 0 || first_weight == 0) return;
  const double largest = loss.mean.scalar_type() == at::kHalf     ? 65504.0
                         : loss.mean.scalar_type() == at::kDouble ? 1e308
                                                                  : 3e38;
  TORCH_CHECK(loss.items / first_weight <= largest, "Loss: items must be at most ", largest,
              " times those of the window's first micro-batch (", first_weight, ") with a loss of dtype ",
              loss.mean.scalar_type(), ", got ", loss.items, "; compute the loss in a wider dtype");
}

/// Checks before backward what would be too late once a parameter has moved.
GRADACCUM_INLINE void check_can_step_in_backward(bool scaled, bool create_graph) {
  TORCH_CHECK(!create_graph,
              "GradAccumulator: create_graph keeps the gradients, which in_backward frees as they arrive; "
              "leave one of the two out");
  TORCH_CHECK(!scaled,
              "GradAccumulator: a loss scaler looks at all gradients before the first parameter moves, and in_backward "
              "steps each as it arrives; use bfloat16, which needs no scaler, or leave in_backward out");
}

GRADACCUM_INLINE void Misuse::at_backward(const Loss& loss, const BackwardOptions& options) const {
  const auto& gradients = *window_.gradients;
  check_usable();
  TORCH_CHECK(!window_.closing_with_others,
              "GradAccumulator: backward() after others_continue() has said that others close a window with this "
              "process; call step() first");
  check_form(WindowForm::weighted);
  TORCH_CHECK(!window_.in_hand, "GradAccumulator: a second backward() before step(); add the losses and call it once");
  TORCH_CHECK(!gradients.applied(), "GradAccumulator: backward() after gradients().apply(); call step() first");
  loss.check();
  check_weight(loss, window_.counter.first_weight());
  if (window_.steps_in_backward)
    check_can_step_in_backward(finite_required(loss.seed) || gradients.must_be_finite(), options.create_graph);
  check_kept();
  if (after_another_ && window_.count() == 0) watch_.check_cleared(window_.parameters());
  check_only_ours();
}

GRADACCUM_INLINE void Misuse::at_plain_backward() {
  TORCH_CHECK(!window_.steps_in_backward,
              "GradAccumulator: with in_backward the parameters are stepped inside of backward; call "
              "optimizer.backward(loss) before each step(), in place of loss.backward()");
  check_form(WindowForm::plain);
  check_not_rewritten();
  if (after_another_ && window_.count() == 0 && window_.counter.steps() > 1) close_watch_.check_cleared();
  close_watch_.warn_of_passes(window_.counter.steps());
}

GRADACCUM_INLINE void Misuse::at_step() const {
  check_usable();
  check_kept();
  if (window_.full() && !window_.closing_with_others) check_scaler();
  if (window_.in_hand && !window_.closing_with_others) check_not_rewritten();
}

GRADACCUM_INLINE void Misuse::after_count() {
  if (watches_closely()) close_watch_.watch_parameters();
  if (window_.weighted() && !window_.gradients->applied()) check_only_ours();
}

GRADACCUM_INLINE void Misuse::at_flush() const {
  check_kept();
  TORCH_CHECK(
      window_.in_hand || !touched(),
      "GradAccumulator: the gradients changed after the last step(); call step() for the last micro-batch, too, "
      "before flush()");
  check_scaler();
  if (window_.count() > 1) check_not_rewritten();
}

GRADACCUM_INLINE void Misuse::at_save() const {
  const auto count = window_.count();
  check_usable();
  check_kept();
  TORCH_CHECK(!window_.in_hand && (count == 0 || !touched()),
              "GradAccumulator: state() in the middle of a micro-batch; call step() first");
  TORCH_CHECK(!window_.gradients->elsewhere(),
              "GradAccumulator: with Shard::gradients a window is saved when it is closed, and there are ", count,
              " micro-batches in it; save after a step() that returned true, or after flush()");
}

GRADACCUM_INLINE void Misuse::at_zero_grad() const {
  if (window_.gradients->spoiled() || window_.in_hand || !touched()) return;
  TORCH_CHECK(false,
              "GradAccumulator: zero_grad() in the middle of a window, and since the last step() somebody has added to "
              "its gradients: a backward for other parameters that came along here, as of a GAN's generator, or one "
              "without a step(). Say whose gradients it is for: loss.backward({}, {}, false, generator->parameters()), "
              "or optimizer.backward(loss, {.inputs = generator->parameters()})");
}

GRADACCUM_INLINE void Misuse::check_usable() const {
  const auto& gradients = *window_.gradients;
  TORCH_CHECK(!gradients.spoiled() || !gradients.stepped(), "GradAccumulator: ", stepped_in_part);
  TORCH_CHECK(!gradients.spoiled(),
              "GradAccumulator: an exception left this window's gradients incomplete; call discard()");
}

GRADACCUM_INLINE void Misuse::check_kept() const {
  if (window_.count() > 0) watch_.check_kept(window_.parameters());
}

/// Leaves out gradients that no backward has made: those are the user's.
GRADACCUM_INLINE void Misuse::check_not_rewritten() const {
  if (watches_closely()) close_watch_.check_gradients(/*of_backward_alone=*/!window_.weighted());
}

GRADACCUM_INLINE bool Misuse::touched() const { return !window_.shared() && watch_.touched(window_.parameters()); }

GRADACCUM_INLINE void Misuse::check_form(WindowForm form) const {
  TORCH_CHECK(window_.form == WindowForm::none || window_.form == form,
              "GradAccumulator: one window mixes optimizer.backward(loss) with loss.backward() or with a step() that "
              "no backward precedes; use one form");
}

/// Throws if the losses were scaled and the gradients are not to be divided by the scale.
GRADACCUM_INLINE void Misuse::check_scaler() const {
  TORCH_CHECK(!window_.scaled || window_.gradients->must_be_finite(),
              "GradAccumulator: the losses of this window are scaled, and its gradients are not to be divided by the "
              "scale; call scaler.step(optimizer) in place of optimizer.step()");
}

/// Skips a window that other processes may add to at any time.
GRADACCUM_INLINE void Misuse::check_only_ours() const {
  if (!window_.shared()) watch_.check_only_ours(window_.parameters(), window_.count() == 0);
}

/// Leaves out windows of one micro-batch: they equal a step without an accumulator, whatever was written.
GRADACCUM_INLINE bool Misuse::watches_closely() const {
  const auto& gradients = *window_.gradients;
  return window_.counter.steps() > 1 && !gradients.applied() && !gradients.stepped() && !window_.shared();
}

GRADACCUM_INLINE void check_goes_with_peers(bool peers, bool in_backward) {
  TORCH_CHECK(!peers || !in_backward,
              "GradAccumulator: in_backward frees each gradient as it arrives, before it could be summed over the "
              "other processes; leave one of the two out");
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
