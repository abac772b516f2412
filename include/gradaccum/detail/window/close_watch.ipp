// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/close_watch.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/arrival_scope.hpp>
#include <gradaccum/detail/window/gradient_watch.hpp>
#include <gradaccum/detail/window/sample.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

namespace gradaccum::detail {

/// The record of each watched parameter. Backward runs a thread for each device, and each writes to its own records.
class WatchedParameters final : public ArrivalListener {
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
  void arrive(std::size_t place) override { see(place); }
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

GRADACCUM_INLINE void CloseWatch::follow(const std::vector<at::Tensor>& parameters) {
  auto some = some_of(parameters);
  if (same_parameters(some, watched_->parameters())) return;
  auto watched = std::make_shared<WatchedParameters>(std::move(some));
  auto hearing = std::make_unique<ArrivalScope>(watched);
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

}  // namespace gradaccum::detail
